"""A fetched model is there whole or not at all, once a node, and needs nobody afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument, Overloaded, Unavailable
from batonlm.registry.cache import fetched, whole
from batonlm.registry.digest import MANIFEST, Contents, fetched_digest, model_digest
from batonlm.registry.sources import File, FolderSource, HubSource, source_of
from tests.cli.hub import MODEL, Hub
from tests.nobody import nobody

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": bytes(range(256)) * 4096,
    "1_Pooling/config.json": b"{  }",
}
WAIT_S = 120.0
"""A bound for liveness."""
SKIPPED = {"pytorch_model.bin": b"pickled", "notes.txt": b".", "onnx/config.json": b"[]"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    for name, data in {**FILES, **SKIPPED}.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(data)
    return made


def quiet(text: str) -> None:
    pass


def fetch(source: FolderSource | HubSource, into: Path, *, weights: bool = True) -> Path:
    return fetched(source, into, quiet, weights=weights, wait_s=0.0)


def holds(found: Path) -> dict[str, bytes]:
    files = (path for path in found.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(found).as_posix(): path.read_bytes() for path in files}


def test_a_folder_is_copied_once_and_not_asked_again(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    assert holds(found) == FILES
    (folder / "model.safetensors").unlink()
    assert fetch(FolderSource(folder), tmp_path / "cache") == found
    assert holds(found) == FILES
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.endswith("partial")]


def test_without_weights(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache", weights=False)
    assert sorted(holds(found)) == ["1_Pooling/config.json", "config.json", "tokenizer.json"]
    assert fetch(FolderSource(folder), tmp_path / "cache") != found


def test_what_was_cut_short_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / f".{FolderSource(folder).name}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(FILES["model.safetensors"][:1000])
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES


def test_the_beginning_of_another_file_is_found_out(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / f".{FolderSource(folder).name}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"another" * 100)
    with pytest.raises(Unavailable, match=r"model\.safetensors is another file"):
        fetch(FolderSource(folder), tmp_path / "cache")
    assert not whole(tmp_path / "cache" / FolderSource(folder).name)
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES


def test_what_is_not_whole_any_more_is_made_again(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    (found / "model.safetensors").write_bytes(b"short")
    assert not whole(found)
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES


def test_models_in_folders_of_one_name_are_two_models(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
        (tmp_path / parent / "model" / "config.json").write_text(f'{{"of": "{parent}"}}')
    found = {}
    for parent in ("a", "b", "a"):
        source = source_of(str(tmp_path / parent / "model"))
        assert isinstance(source, FolderSource)
        found[parent] = fetch(source, tmp_path / "cache")
        assert json.loads((found[parent] / "config.json").read_text()) == {"of": parent}
    assert found["a"] != found["b"]


def test_revisions_that_differ_in_a_slash_are_two() -> None:
    names = {HubSource("some/model", revision).name for revision in ("a/b", "a-b", "a%2Fb", "")}
    assert len(names) == 4
    assert all("/" not in name for name in names)


def test_a_source_that_changed_is_fetched_again(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    # Of the same size: another fine-tuning of the same model.
    (folder / "model.safetensors").write_bytes(bytes(len(FILES["model.safetensors"])))
    assert fetch(FolderSource(folder), tmp_path / "cache") == found
    assert (found / "model.safetensors").read_bytes() == bytes(len(FILES["model.safetensors"]))
    copied = (found / "model.safetensors").stat().st_ino
    # What was only touched is not.
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert fetch(FolderSource(folder), tmp_path / "cache") == found
    assert (found / "model.safetensors").stat().st_ino == copied


def test_a_copy_that_was_changed_is_made_again(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    data = FILES["model.safetensors"]
    (found / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not whole(found)
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES
    os.utime(found / "config.json", ns=(1, 1))
    assert whole(found)


def test_what_another_version_fetched_is_not_believed(folder: Path, tmp_path: Path) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    sizes = {name: len(data) for name, data in FILES.items()}
    (found / MANIFEST).write_text(json.dumps({"files": sizes}))
    assert not whole(found)
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES


def test_files_of_an_older_try_are_not_taken_for_the_models(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / f".{FolderSource(folder).name}.partial"
    partial.mkdir(parents=True)
    (partial / "model-00002.safetensors").write_bytes(b"of another revision")
    assert holds(fetch(FolderSource(folder), tmp_path / "cache")) == FILES


def test_the_manifest_has_the_digest_that_workers_of_these_weights_have(
    folder: Path, tmp_path: Path
) -> None:
    found = fetch(FolderSource(folder), tmp_path / "cache")
    digest = model_digest(folder / "config.json", [folder / "model.safetensors"])
    assert fetched_digest(found) == digest
    light = fetch(FolderSource(folder), tmp_path / "cache", weights=False)
    assert fetched_digest(light) == ""
    assert fetched_digest(folder) == ""


def test_nothing_is_begun_that_does_not_fit(tmp_path: Path) -> None:
    class Large(FolderSource):
        def files(self, *, weights: bool) -> list[File]:
            return [File("model.safetensors", 1 << 60)]

        def copy(self, file: File, into: Path) -> Contents:
            raise AssertionError("begun")

    with pytest.raises(Overloaded, match="GB are free there"):
        fetch(Large(tmp_path), tmp_path / "cache")


def test_two_at_once_fetch_once(folder: Path, tmp_path: Path) -> None:
    copying, go_on, copied = threading.Event(), threading.Event(), []

    class Slow(FolderSource):
        def copy(self, file: File, into: Path) -> Contents:
            copying.set()
            assert go_on.wait(WAIT_S)
            copied.append(file.name)
            return super().copy(file, into)

    def one(say: threading.Event) -> None:
        fetched(Slow(folder), tmp_path / "cache", lambda _: say.set(), weights=True, wait_s=WAIT_S)

    waits = threading.Event()
    first = threading.Thread(target=one, args=(threading.Event(),))
    second = threading.Thread(target=one, args=(waits,))
    first.start()
    assert copying.wait(WAIT_S)
    second.start()
    assert waits.wait(WAIT_S)
    go_on.set()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert sorted(copied) == sorted(FILES)
    assert holds(tmp_path / "cache" / FolderSource(folder).name) == FILES


def test_nobody_waits_for_ever(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / f".{FolderSource(folder).name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process"):
            fetch(FolderSource(folder), cache)
    assert holds(fetch(FolderSource(folder), cache)) == FILES


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for model in ("/nowhere", "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(InvalidArgument, match="neither a folder nor a hub id"):
            source_of(model)
    with pytest.raises(InvalidArgument, match="no revisions"):
        source_of(str(tmp_path), "main")


def command(hub: Hub, cache: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """`baton fetch` as a process of its own: the hub's library reads its environment when it is
    imported."""
    done = subprocess.run(
        [sys.executable, "-m", "batonlm.cli.main", "fetch", MODEL, "--into", str(cache), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(cache.parent / "home"),
            "HF_HUB_DISABLE_XET": "1",
            **environment,
        },
    )
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.deep
def test_a_model_of_the_hub(tmp_path: Path) -> None:
    hub, cache = Hub({**FILES, **SKIPPED}), tmp_path / "cache"
    with hub.serving():
        code, said, told = command(hub, cache)
        assert (code, said) == (0, str(cache / "baton--made")), told
        assert holds(Path(said)) == FILES
        asked = len(hub.asked)
        assert command(hub, cache)[:2] == (0, said)
        assert len(hub.asked) == asked, "what is there is not asked for"
        code, said, told = command(hub, cache, "--revision", "v1", "--tokenizer-only")
        assert (code, said) == (0, str(cache / "baton--made@v1.tokenizer")), told


@pytest.mark.deep
def test_a_hub_that_answers_nothing_is_given_up(tmp_path: Path) -> None:
    hub = Hub(FILES)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, _, told = command(hub, tmp_path / "cache", HF_HUB_DOWNLOAD_TIMEOUT="1")
        assert code == 1 and "the hub cannot be reached" in told
        told = refused_up(hub.url, MODEL, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1")
        assert "is no folder, and the hub cannot be reached" in told


@pytest.mark.parametrize(
    ("token", "model", "said"),
    (
        ("right", MODEL, "is gated: accept its terms on the hub, and give a token in HF_TOKEN"),
        ("", "baton/none", "the hub has no baton/none, or it is private and needs a token"),
        (None, MODEL, "is no folder, and the hub cannot be reached"),
    ),
    ids=("gated", "private or absent", "not reached"),
)
def test_up_names_what_the_hub_refuses(
    token: str | None, model: str, said: str, tmp_path: Path
) -> None:
    hub = Hub(FILES)
    hub.token = token or ""
    with hub.serving() if token is not None else nobody() as refuses:
        told = refused_up(hub.url or f"http://{refuses}", model, tmp_path)
    assert said in told and told.startswith("baton up: ") and told.count("\n") == 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("token", "model", "said"),
    (
        ("wrong", MODEL, "the hub does not know your token"),
        ("stranger", MODEL, "is gated: the account of your token has to accept its terms"),
        ("right", "baton/none", "has no baton/none, or it is private and your token may not read"),
    ),
)
def test_up_names_what_the_hub_refuses_a_token(
    token: str, model: str, said: str, tmp_path: Path
) -> None:
    hub = Hub(FILES)
    hub.token, hub.stranger = "right", "stranger"
    with hub.serving():
        told = refused_up(hub.url, model, tmp_path, HF_TOKEN=token)
        assert said in told and told.count("\n") == 1
        if model == MODEL:
            code, _, told = command(hub, tmp_path / "cache", HF_TOKEN=token)
            assert code == 1 and said in told and "Traceback" not in told


@pytest.mark.deep
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("a file system that is full takes a mount, which is not allowed here")
    hub = Hub({**FILES, "model.safetensors": bytes(4 << 20)})
    try:
        with hub.serving():
            told = refused_up(hub.url, MODEL, tmp_path, HF_HOME=str(disk))
            assert f"the disk is full: {MODEL} is not complete in the hub's cache" in told
            # `baton fetch` looks before it begins; others may fill the disk meanwhile.
            copied = script(hub, COPIES, str(disk), HF_HOME=str(tmp_path / "home"))
            assert "the disk is full: model.safetensors is not whole" in copied
            found = script(hub, FINDS, HF_HOME=str(tmp_path / "home"))
            assert holds(Path(found)) == hub.files
    finally:
        subprocess.run(["umount", str(disk)], check=True)


COPIES = """
import sys
from pathlib import Path
from batonlm.registry.sources import HubSource
from batonlm.core.errors import BatonError
source = HubSource(sys.argv[1], "")
(file,) = (file for file in source.files(weights=True) if file.size > 1 << 20)
try:
    source.copy(file, Path(sys.argv[2]))
except BatonError as error:
    print(error.message)
"""
FINDS = """
import sys
from batonlm.registry.sources import hub_folder
print(hub_folder(sys.argv[1]))
"""


def script(hub: Hub, text: str, *words: str, **environment: str) -> str:
    """What a program prints that the model's name is given."""
    done = subprocess.run(
        [sys.executable, "-c", text, MODEL, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused_up(url: str, model: str, folder: Path, **environment: str) -> str:
    """Returns what `baton up` says of a model that it cannot have."""
    ports = ("--http-port", "0", "--grpc-port", "0", "--transport", "loopback")
    done = subprocess.run(
        [sys.executable, "-m", "batonlm.cli.main", "up", "--model", model, *ports],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(folder / "home"),
            "XDG_STATE_HOME": str(folder),
            **environment,
        },
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.deep
def test_a_hub_that_refuses_or_lies(tmp_path: Path) -> None:
    hub, cache = Hub(FILES), tmp_path / "cache"
    with hub.serving():
        hub.token = "right"
        code, _, told = command(hub, cache)
        assert code == 1 and "is gated: accept its terms" in told and "HF_TOKEN" in told
        assert "Traceback" not in told
        hub.damaged = True
        code, _, told = command(hub, cache, HF_TOKEN="right")
        assert code == 1 and "came damaged" in told
        hub.damaged = False
        code, said, told = command(hub, cache, HF_TOKEN="right")
        assert code == 0 and holds(Path(said)) == FILES, told
    with nobody() as address:
        hub.url = f"http://{address}"
        code, _, told = command(hub, tmp_path / "other")
    assert code == 1 and "cannot be reached" in told and "Traceback" not in told
