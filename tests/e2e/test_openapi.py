"""schemathesis against a running Baton's own OpenAPI document: nothing of it is untrue."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.relay import Relay

pytestmark = pytest.mark.deep

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


def schemathesis(relay: Relay, folder: Path, *more: str) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("st")),
            "run",
            f"{relay.http}/openapi.json",
            *("--checks", ",".join(CHECKS)),
            *("--seed", "1", "--request-timeout", "60", "--no-color", "--warnings", "off"),
            *more,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "No issues found" in done.stdout, done.stdout[-2000:]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """All five processes, with an engine that makes its tokens up: long answers are cheap."""
    running = Relay(tmp_path_factory.mktemp("quick"), "--runner", "fake")
    yield running
    running.close()


def test_a_few_requests_of_each_kind(quick: Relay, tmp_path: Path) -> None:
    schemathesis(quick, tmp_path, "--max-examples", "5", "--phases", "examples,fuzzing")


@pytest.mark.slow
def test_many_requests_of_each_kind(quick: Relay, tmp_path: Path) -> None:
    schemathesis(quick, tmp_path, "--max-examples", "200")
