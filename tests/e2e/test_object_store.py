"""A model in an object store: Baton fetches it, and answers as with the folder that was pushed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from batonlm.cli.layout import resolve_model
from batonlm.registry.cache import default_cache
from batonlm.registry.object_store import ObjectSource
from tests.e2e.relay import PATIENCE_S, Relay
from tests.registry.seaweed import ObjectStore, known, serving

pytestmark = pytest.mark.deep

URL = "s3://registry/models/small@v1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving(tmp_path_factory.mktemp("seaweed")) as found, known(found):
        folder, _ = resolve_model("")
        ObjectSource(URL).push(folder, lambda _: None)
        yield found


def test_up_serves_it(store: ObjectStore, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    relay = Relay(
        tmp_path,
        *("--model", URL, "--prefill", "0", "--kv-memory-mib", "64"),
        environment=store.environment | cache,
    )
    try:
        body = {"model": "small", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{relay.http}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200 and answer.json()["model"] == "small", answer.text
    finally:
        relay.close()
    assert list((tmp_path / "cache" / "baton" / "models").glob("small@v1-*/model.safetensors"))


@pytest.mark.parametrize("role", ["tokenizer", "decode"])
def test_a_process_of_its_own_fetches_it(store: ObjectStore, tmp_path: Path, role: str) -> None:
    command = [sys.executable, "-m", f"batonlm.{role}", "--model", URL]
    command += ["--model-cache", str(tmp_path / "cache")]
    if role == "decode":
        command += ["--kv-memory-mib", "64", "--transport", "loopback"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        said = next((line for line in process.stdout if '"listen"' in line), "")
        assert said and json.loads(said)["role"] == role, process.stderr.read()
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    (found,) = (each for each in (tmp_path / "cache").iterdir() if each.is_dir())
    assert bool(list(found.glob("*.safetensors"))) is (role == "decode")


def test_what_is_not_there_is_said_before_anything_starts(
    store: ObjectStore, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "batonlm.cli.main", "up", "--model", f"{URL}1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and "has no manifest" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(default_cache().glob("small@v11-*")), "nothing is left of it"
