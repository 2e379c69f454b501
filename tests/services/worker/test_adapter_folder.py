"""Where a worker looks for an adapter: below its folder, or a prefix of an object store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import obstore
import pytest

from batonlm.core.errors import InvalidArgument, NotFound, Overloaded
from batonlm.registry.object_store import ObjectSource
from batonlm.worker.adapters import FINDS, MAX_CHANGES, MAX_PATH, AdapterFolder, WorkerAdapters
from tests.engine.engine_thread import Heard, Runner, running
from tests.registry.seaweed import ObjectStore, known, serving
from tests.services.router.conftest import until


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_paths_that_every_router_would_keep_are_bounded(tmp_path: Path, ends: ExitStack) -> None:
    part = "a" * 200
    deep = tmp_path / "all" / Path(*[part] * 6)
    deep.mkdir(parents=True)
    (tmp_path / "all" / "short").symlink_to(deep)
    folder = AdapterFolder(str(tmp_path / "all"), tmp_path / "cache")
    assert folder.find(f"{part}/{part}", ends)[1] == f"{part}/{part}"
    for path in ("/".join([part] * 6), str(deep), "short"):
        assert len(str(deep.relative_to(tmp_path / "all"))) > MAX_PATH
        with pytest.raises((InvalidArgument, NotFound)):
            folder.find(path, ends)
    assert folder.relative(deep) == "", "it cannot be loaded again by that path"


class HangingFolder(AdapterFolder):
    """In a store that takes requests and does not answer."""

    def __init__(self, where: Path) -> None:
        super().__init__(str(where))
        self.looking = 0
        self.answers = threading.Event()

    def find(self, path: str, ends: ExitStack) -> tuple[Path, str]:
        self.looking += 1
        assert self.answers.wait(120)
        return super().find(path, ends)


async def test_a_store_that_hangs_leaves_threads_to_others(tmp_path: Path) -> None:
    """And what waits for it is bounded."""
    folder = HangingFolder(tmp_path)
    for place in range(MAX_CHANGES):
        (tmp_path / f"a{place}").mkdir()
        (tmp_path / f"a{place}" / "matrices").write_bytes(b"%d" % place)
    runner = Runner()
    async with running(runner, Heard()) as engine:
        adapters = WorkerAdapters(engine, runner, folder, on_use=True)
        uses = [
            asyncio.ensure_future(adapters.load_used(f"a{place}")) for place in range(MAX_CHANGES)
        ]
        try:
            await until(lambda: folder.looking >= FINDS)
            with pytest.raises(Overloaded):
                await adapters.load_used("one-more")
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(lambda: "sealed") == "sealed"
            assert folder.looking == FINDS
        finally:
            folder.answers.set()
        await asyncio.gather(*uses)
        assert len(adapters.held.adapters) == MAX_CHANGES
        with pytest.raises(NotFound):
            await adapters.load_used("one-more")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving(tmp_path_factory.mktemp("seaweed")) as found, known(found):
        yield found


@pytest.mark.deep
def test_below_a_prefix(store: ObjectStore, tmp_path: Path, ends: ExitStack) -> None:
    adapter = tmp_path / "made"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"matrices")
    for name in ("adapters/french", "adapters/team/sql", "outside"):
        ObjectSource(f"s3://registry/{name}").push(adapter, lambda _: None)
    folder = AdapterFolder("s3://registry/adapters/", tmp_path / "cache")
    for name in ("french", "team/sql"):
        found, path = folder.find(name, ends)
        assert path == name
        assert (found / "adapter_model.safetensors").read_bytes() == b"matrices"
    for name in ("german", "team"):
        with pytest.raises(NotFound):
            folder.find(name, ends)
    for name in ("../outside", "a/../../outside", "", "a b", "x" * 2000):
        with pytest.raises((InvalidArgument, NotFound)):
            folder.find(name, ends)
    obstore.put(store.store(), "adapters/french/adapter_config.json", b"[]")
    again = AdapterFolder("s3://registry/adapters", tmp_path / "other")
    with pytest.raises(Exception, match="could not be fetched"):
        again.find("french", ends)
