"""`baton doctor`: each check on this machine, and on things that are really broken."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from batonlm.cli import checks, doctor, state
from batonlm.cli.access import Access, access_of, add_arguments
from batonlm.cli.checks import Finding, Status, ok, warn
from tests.cli.test_chat import serving
from tests.nobody import nobody
from tests.services.router_http.scripted import Scripted

BUNDLED = Path(str(files("batonlm"))) / "models" / "baton-tiny"


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *argv])


@pytest.fixture(autouse=True)
def no_baton_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be broken."""
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.mark.deep
def test_this_machine_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    """All checks for real, NIXL moving a megabyte between two processes among them."""
    assert doctor.run(parsed("--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    found = {check["name"]: check for check in report["checks"]}
    assert not [name for name, check in found.items() if check["status"] == "fail"]
    assert "1048576 bytes" in found["nixl"]["detail"]
    assert "LlamaForCausalLM" in found["model"]["detail"]


def test_ucx_that_cannot_work_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    finding = checks.nixl()
    assert finding.status is Status.FAIL
    assert "loopback" in finding.advice


@pytest.mark.parametrize(
    ("breakage", "detail"),
    [
        ("tokenizer.json", "no tokenizer.json"),
        ("config.json", "no config.json"),
        ("model.safetensors", "no safetensors"),
    ],
)
def test_a_model_that_lacks_a_file(folder: Path, breakage: str, detail: str) -> None:
    (folder / breakage).unlink()
    finding = checks.model(str(folder))()
    assert finding.status is Status.FAIL and detail in finding.detail


def test_weights_that_are_cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    finding = checks.model(str(folder))()
    assert finding.status is Status.FAIL and "cut short" in finding.detail


@pytest.mark.deep
@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"model_type": "of-the-future"}, "of an architecture that transformers"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
def test_architectures_that_cannot_be_served(
    folder: Path, settings: dict[str, object], detail: str
) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    finding = checks.model(str(folder))()
    assert finding.status is Status.FAIL and detail in finding.detail


def test_a_model_that_is_not_there() -> None:
    assert checks.model("/nowhere/at/all")().status is Status.FAIL


def test_limits_that_are_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_OPEN_FILES", 1 << 40)
    monkeypatch.setattr(checks, "MIN_SHM_BYTES", 1 << 60)
    for check in (checks.open_files, checks.shared_memory):
        finding = check()
        assert finding.status is Status.WARN and finding.advice


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Scripted()) as address:
        yield address


def there(address: str | None) -> Access:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc")
    add_arguments(parser)
    return access_of(parser.parse_args(["--grpc", address] if address else []), "")


def test_a_baton_that_serves(address: str) -> None:
    assert doctor.running(there(address)) == ok(f"serving at {address}")
    state.write({"grpc": address, "http": "", "processes": []} | state.process(os.getpid()))
    assert doctor.running(there(None)) == ok(f"serving at {address}")


def test_a_baton_that_is_not_ready() -> None:
    with serving(Scripted(), ready=False) as address:
        finding = doctor.running(there(address))
    assert finding.status is Status.FAIL and "not ready" in finding.detail


def test_no_baton_is_a_failure_only_where_one_was_named(address: str) -> None:
    assert doctor.running(there(None)).status is Status.OK
    with nobody() as gone:
        finding = doctor.running(there(gone))
    assert finding.status is Status.FAIL and gone in finding.detail


def test_findings_are_lines_and_a_failure_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(checks, "nixl", broken)
    monkeypatch.setattr(checks, "gpu", lambda: warn("half a GPU", "get the other half"))
    assert doctor.run(parsed()) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    python") for line in lines)
    assert any(line.startswith("fail  nixl") and "ZeroDivisionError" in line for line in lines)
    assert any(line.startswith("warn  gpu") and "half a GPU" in line for line in lines)
    assert any("-> get the other half" in line for line in lines)
    assert any(line.startswith("ok    open files") for line in lines)
