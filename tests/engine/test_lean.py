"""An engine starts without importing what only compiled or distributed models need."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNWANTED = (
    "IPython", "pandas", "sklearn", "scipy", "tensorflow", "torch._dynamo", "torch._inductor",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torchvision", "triton",
)  # fmt: skip

START = """
import sys
import batonlm.decode.__main__, batonlm.prefill.__main__
from batonlm.cli.layout import resolve_model
from batonlm.engine.config import EngineConfig, configure_threads
configure_threads(1)
from batonlm.engine.footprint import foresee
from batonlm.engine.runner import TorchRunner
config = EngineConfig(str(resolve_model("")[0]), kv_memory_bytes=4 << 20)
foresee(config)
TorchRunner.load(config).close()
print(*sys.modules)
"""

COMPILE = """
import sys
from batonlm.engine.lean import without_compiler
import torch
assert "torch._dynamo" not in sys.modules
with without_compiler():
    assert torch._dynamo.disable(len) is len
    from torch._dynamo.exc import Unsupported
assert torch._dynamo.exc.Unsupported is Unsupported
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""

AFTERWARDS = """
from batonlm.engine.lean import without_compiler
import sys
import torch
with without_compiler():
    stand_in = torch._dynamo
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo is not stand_in
print(torch._dynamo.__file__)
"""


def output(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.deep
def test_an_engine_starts_without_compilers_and_distributed_tensors() -> None:
    imported = set(output(START).split())
    assert {"torch", "transformers.masking_utils", "batonlm.engine.runner"} <= imported
    assert not imported & set(UNWANTED)


@pytest.mark.deep
def test_the_compiler_answers_what_its_stand_in_does_not() -> None:
    assert output(COMPILE) == "2.0\n"


@pytest.mark.deep
def test_the_compiler_can_be_imported_afterwards() -> None:
    assert output(AFTERWARDS).strip().endswith("__init__.py")
