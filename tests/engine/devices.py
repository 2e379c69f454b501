"""On which devices the tests of GPU code run: never on two in one process.

Triton's kernels are compiled on machines with a GPU, where only `-m gpu` chooses them, and
interpreted on all others.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
import torch


def reason_against_interpreter() -> str:
    if torch.cuda.is_available():
        return "kernels are compiled"
    if importlib.util.find_spec("triton") and version("triton").startswith(("3.5.", "3.6.")):
        return "this Triton's interpreter does what numpy no longer allows"
    return ""


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    ],
)

INTERPRETER = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        bool(reason_against_interpreter()), reason=reason_against_interpreter()
    ),
)
