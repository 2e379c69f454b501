"""Models in an object store, against a real server: whole and as they were pushed, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest

from batonlm.core.errors import InvalidArgument, Unavailable
from batonlm.registry import object_store
from batonlm.registry.cache import fetched, whole
from batonlm.registry.digest import MANIFEST
from batonlm.registry.object_store import ObjectSource, object_source
from batonlm.registry.sources import source_of
from tests.registry.seaweed import ObjectStore, known, serving

pytestmark = pytest.mark.deep

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model-1.safetensors": bytes(range(256)) * 5000,
    "model-2.safetensors": b"second",
    "1_Pooling/config.json": b"{  }",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving(tmp_path_factory.mktemp("seaweed")) as found, known(found):
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in {**FILES, "notes.txt": b"not the model's"}.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_bytes(data)
    return tmp_path / "made"


@pytest.fixture
def url(store: ObjectStore, folder: Path, request: pytest.FixtureRequest) -> str:
    """A model that was pushed, another one for each test."""
    found = f"s3://registry/models/{request.node.name.replace('[', '-').strip(']')}@v1"
    ObjectSource(found).push(folder, quiet)
    return found


def quiet(_text: str) -> None:
    pass


def fetch(url: str, into: Path, *, weights: bool = True) -> Path:
    return fetched(object_source(url), into, quiet, weights=weights, wait_s=0.0)


def holds(found: Path) -> dict[str, bytes]:
    files = (path for path in found.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(found).as_posix(): path.read_bytes() for path in files}


def key(url: str, name: str) -> str:
    return f"{url.removeprefix('s3://registry/')}/{name}"


def test_what_was_pushed_is_fetched(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PIECE_BYTES", 100_000)
    found = fetch(url, tmp_path / "cache")
    assert holds(found) == FILES and whole(found)
    light = fetch(url, tmp_path / "cache", weights=False)
    assert set(holds(light)) == {"config.json", "tokenizer.json", "1_Pooling/config.json"}
    assert object_source(url).served_name == "test_what_was_pushed_is_fetched"


def test_a_version_stays_what_it_is(url: str, folder: Path, tmp_path: Path) -> None:
    ObjectSource(url).push(folder, quiet)
    (folder / "config.json").write_bytes(b"{   }")
    with pytest.raises(InvalidArgument, match="other files already"):
        ObjectSource(url).push(folder, quiet)
    assert holds(fetch(url, tmp_path / "cache")) == FILES
    other = url.replace("@v1", "@v2")
    ObjectSource(other).push(folder, quiet)
    assert holds(fetch(other, tmp_path / "cache"))["config.json"] == b"{   }"


def test_of_two_that_push_a_version_at_once_one_is_refused_or_they_are_equal(
    store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    url = "s3://registry/models/raced@v1"
    failures: list[Exception] = []
    both = threading.Barrier(2, timeout=60)

    def push(index: int) -> None:
        own = tmp_path / str(index)
        own.mkdir()
        (own / "model.safetensors").write_bytes(b"weights of %d" % index)
        both.wait()
        try:
            ObjectSource(url).push(own, quiet)
        except InvalidArgument as error:
            failures.append(error)

    threads = [threading.Thread(target=push, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(failures) == 1
    try:
        found = holds(fetch(url, tmp_path / "cache"))
    except Unavailable as error:
        # The weights of one, and the manifest of the other.
        assert "model.safetensors" in error.message
    else:
        assert found["model.safetensors"] in (b"weights of 0", b"weights of 1")


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
@pytest.mark.parametrize("size", ["same", "shorter", "none"])
def test_what_is_not_what_the_manifest_names_is_refused_by_name(
    url: str, store: ObjectStore, tmp_path: Path, name: str, size: str
) -> None:
    data = FILES[name]
    if size == "none":
        obstore.delete(store.store(), key(url, name))
    else:
        other = data[:-1] if size == "shorter" else bytes([data[0] ^ 1]) + data[1:]
        obstore.put(store.store(), key(url, name), other)
    with pytest.raises(Unavailable, match=name):
        fetch(url, tmp_path / "cache")
    assert not [each for each in (tmp_path / "cache").iterdir() if each.name[0] != "."]
    obstore.put(store.store(), key(url, name), data)
    assert holds(fetch(url, tmp_path / "cache")) == FILES


def test_what_nobody_pushed_is_no_model(url: str, store: ObjectStore, tmp_path: Path) -> None:
    for absent in (f"{url}1", "s3://registry/nothing", "s3://no-such-bucket/a"):
        with pytest.raises((InvalidArgument, Unavailable)):
            fetch(absent, tmp_path / "cache")
    obstore.put(store.store(), key(url, "extra.safetensors"), b"a stranger's")
    assert holds(fetch(url, tmp_path / "cache")) == FILES
    obstore.delete(store.store(), key(url, MANIFEST))
    assert holds(fetch(url, tmp_path / "cache")) == FILES, "what is here stays"
    with pytest.raises(InvalidArgument, match="has no manifest"):
        fetch(url, tmp_path / "other")
    entry = {"name": "../../outside.json", "size": 1, "sha256": "0" * 64}
    for text in (
        "", "[]", '{"files": []}', '{"files": 3}', "[" * 20_000,
        json.dumps({"files": [entry]}),
        json.dumps({"files": [{**entry, "name": "a\0.json"}]}),
        json.dumps({"files": [{**entry, "name": "a.json", "size": float("inf")}]}),
        json.dumps({"files": [{**entry, "name": "a.json", "sha256": "short"}]}),
        json.dumps({"files": [{**entry, "name": "a.json"}] * 2}),
    ):  # fmt: skip
        obstore.put(store.store(), key(url, MANIFEST), text.encode())
        with pytest.raises(InvalidArgument, match="is no manifest"):
            fetch(url, tmp_path / "other")


def test_a_version_that_was_replaced_is_fetched_again(
    url: str, store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    found = fetch(url, tmp_path / "cache")
    obstore.delete(store.store(), key(url, MANIFEST))
    (folder / "model-2.safetensors").write_bytes(b"SECOND")
    ObjectSource(url).push(folder, quiet)
    assert fetch(url, tmp_path / "cache") == found
    assert holds(found)["model-2.safetensors"] == b"SECOND"


def test_what_was_cut_short_is_gone_on_with(url: str, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / f".{object_source(url).name}.partial"
    partial.mkdir(parents=True)
    (partial / "model-1.safetensors").write_bytes(FILES["model-1.safetensors"][:1000])
    assert holds(fetch(url, tmp_path / "cache")) == FILES
    longer = tmp_path / "longer" / f".{object_source(url).name}.partial"
    longer.mkdir(parents=True)
    (longer / "model-2.safetensors").write_bytes(b"longer than it should be")
    with pytest.raises(Unavailable, match=r"model-2\.safetensors"):
        fetch(url, tmp_path / "longer")
    assert holds(fetch(url, tmp_path / "longer")) == FILES


def test_who_may_not_read_it_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fetch(url, tmp_path / "cache")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(InvalidArgument, match="to these credentials"):
        fetch(url, tmp_path / "other")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert fetch(url, tmp_path / "cache") == found, "what is here is used without the store"
    with pytest.raises(Unavailable, match="does not answer"):
        fetch(url, tmp_path / "other")


class NoBucket(BaseHTTPRequestHandler):
    """Answers as S3 does where there is no such bucket; the server of these tests makes it."""

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        text = b"<Error><Code>NoSuchBucket</Code></Error>"
        self.send_response(404)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST = _refuse

    def log_message(self, *_: object) -> None:
        pass


def test_a_bucket_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    with ThreadingHTTPServer(("127.0.0.1", 0), NoBucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(Unavailable, match="the bucket of s3://absent/a is not there"):
                ObjectSource("s3://absent/a").push(folder, quiet)
        finally:
            server.shutdown()


def test_the_commands(url: str, store: ObjectStore, folder: Path, tmp_path: Path) -> None:
    def baton(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batonlm.cli.main", *words],
            capture_output=True, text=True, timeout=120, env={**os.environ, **store.environment},
        )  # fmt: skip

    done = baton("push", str(folder), "s3://registry/models/pushed@1")
    assert done.returncode == 0 and done.stdout == "s3://registry/models/pushed@1\n", done.stderr
    done = baton("fetch", done.stdout.strip(), "--into", str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert holds(found) == FILES
    again = baton(
        "fetch", "s3://registry/models/pushed", "--revision", "1", "--into", found.parent.as_posix()
    )
    assert again.stdout == done.stdout
    (found / "config.json").write_bytes(b"{    }")
    done = baton("push", str(found), "s3://registry/models/pushed@2")
    assert done.returncode == 1 and "config.json is not the file that was fetched" in done.stderr
    for bad in (
        "s3://registry",
        "s3://registry/../a",
        "s3://Bad_Bucket/a",
        "s3://registry/a b",
        "/a",
    ):
        done = baton("push", str(folder), bad)
        assert done.returncode == 1 and "Traceback" not in done.stderr, bad


@pytest.mark.parametrize(
    "bad",
    [
        *("s3://", "s3://b", "s3://bucket", "s3://bucket//a", "s3://bucket/a/../b"),
        *("s3://bucket/a%2fb", "s3://bucket/a b", "s3://Bad_Bucket/a", "s3://bucket/" + "a" * 300),
    ],
)
def test_what_is_no_place_in_a_store_is_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="is not s3://bucket/name"):
        source_of(bad)
