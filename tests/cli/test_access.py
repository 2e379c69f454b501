"""Whom a command trusts, and what it shows to whom."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from batonlm.cli import state
from batonlm.cli.access import Access, access_of, add_arguments, peer_token
from batonlm.core.errors import InvalidArgument


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_API_KEY", raising=False)


def found(*words: str) -> Access:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grpc")
    add_arguments(parser)
    return access_of(parser.parse_args(words), "127.0.0.1:1")


def test_the_running_batons_ca_is_trusted_there_and_nowhere_else(tmp_path: Path) -> None:
    assert found() == Access("127.0.0.1:1")
    (tmp_path / "ca.pem").write_bytes(b"up's")
    (tmp_path / "other.pem").write_bytes(b"other")
    ca = str(tmp_path / "ca.pem")
    state.write({"grpc": "127.0.0.1:2", "ca": ca, **state.process(os.getpid())})
    assert found() == Access("127.0.0.1:2", b"up's")
    assert found("--grpc", "127.0.0.1:3") == Access("127.0.0.1:3")
    assert found("--ca", str(tmp_path / "other.pem")).ca == b"other"
    assert found("--tls").ca == b""


def test_either_face_of_the_running_baton_is_found(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"up's")
    told = {"http": "https://127.0.0.1:3", "grpc": "127.0.0.1:2", "ca": str(tmp_path / "ca.pem")}
    state.write(told | state.process(os.getpid()))
    args = argparse.Namespace(http=None, ca=None, tls=False, api_key="")
    assert access_of(args, "127.0.0.1:1", "http") == Access("127.0.0.1:3", b"up's")
    args.http = "127.0.0.1:2"
    assert access_of(args, "127.0.0.1:1", "http") == Access("127.0.0.1:2")


def test_a_key_is_shown_but_never_to_another_machine_in_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found().metadata == ()
    monkeypatch.setenv("BATON_API_KEY", "baton-k")
    assert found().metadata == (("authorization", "Bearer baton-k"),)
    with pytest.raises(InvalidArgument) as caught:
        found("--grpc", "10.0.0.1:1")
    assert caught.value.field == "api_key"
    assert found("--grpc", "10.0.0.1:1", "--tls").key == "baton-k"


@pytest.mark.parametrize("words", [("--ca", "/nowhere"), ("--ca", "/dev/null"), ("--api-key", "é")])
def test_what_cannot_be_used_is_named(words: tuple[str, str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        found(*words)
    assert caught.value.field == words[0].removeprefix("--").replace("-", "_")


def test_workers_of_the_running_baton_are_shown_its_token_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BATON_PEER_TOKEN", raising=False)
    assert peer_token(["127.0.0.1:5"]) == ""
    said = {"token": "t", "processes": [{"grpc": "127.0.0.1:5"}, {"grpc": "127.0.0.1:6"}]}
    state.write(said | state.process(os.getpid()))
    assert peer_token(["127.0.0.1:5", "127.0.0.1:6"]) == "t"
    assert peer_token(["127.0.0.1:5", "10.0.0.1:6"]) == ""
    monkeypatch.setenv("BATON_PEER_TOKEN", "given")
    assert peer_token(["10.0.0.1:6"]) == "given"
