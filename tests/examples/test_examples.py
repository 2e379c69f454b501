"""The programs of examples/ run as they stand, against scripted answers over a real socket."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_chat import serving
from tests.services.router_http.scripted import ADAPTER, MODEL, Scripted, whole_answer
from tests.services.router_http.test_timings import TIMES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ASKED = "<user>What is the capital of France?"
ANSWER = whole_answer(ASKED, 0)
TIMEOUT_S = 240


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Scripted(stages=TIMES)) as address:
        yield address


def run(*command: str | Path, where: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python(address: str) -> None:
    said = run(sys.executable, EXAMPLES / "client.py", address)
    assert f"models: {MODEL.name}, {ADAPTER.name}\n{ANSWER}\n" in said
    assert "decode           500.00 ms" in said
    assert whole_answer("<user>What is 3 + 3?", 0)[:16] in said
    assert "options.sampling.temperature: temperature must be" in said


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the example's packages, and buf, are installed."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    folder = tmp_path_factory.mktemp("npm") / "examples" / "javascript"
    shutil.copytree(EXAMPLES / "javascript", folder)
    (folder.parents[1] / "protos").symlink_to(ROOT / "protos")
    run("npm", "install", "--no-audit", "--no-fund", "--no-save", "@bufbuild/buf@1", where=folder)
    return folder


@pytest.mark.slow
def test_javascript(address: str, npm: Path) -> None:
    said = run("node", "chat.mjs", address, where=npm)
    assert said == f"{ANSWER[:32]}\n32 tokens\nfirst text after 30 ms\n"


@pytest.mark.slow
def test_buf_curl(address: str, npm: Path) -> None:
    said = run("sh", EXAMPLES / "grpc.sh", address, BUF=str(npm / "node_modules/.bin/buf"))
    assert "baton.v1.Inference/Chat" in said
    assert f'"name": "{MODEL.name}"' in said
    assert '"finishReason": "FINISH_REASON_LENGTH"' in said
