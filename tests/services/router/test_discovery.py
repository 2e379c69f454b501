"""The contract of every source, on a list, on DNS and on Kubernetes; and how each is written."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.router.config import RouterConfig
from batonlm.router.workers.discovery import (
    AddressSource,
    Discovery,
    DnsSource,
    DnsTarget,
    ListTarget,
    Replicas,
    ServiceTarget,
    StaticDiscovery,
    StaticSource,
    discovery_of,
    parse_target,
    resolve,
)
from batonlm.router.workers.discovery_k8s import KubernetesSource, api_of, runs
from batonlm.rpc.kubernetes_api import NoAnswer, open_api
from tests.rpc.authority import Authority
from tests.services.router import kubernetes_api
from tests.services.router.conftest import until
from tests.services.router.kubernetes_api import FakeApi, endpoint, slice_of
from tests.services.router.listed import Listed

WITHIN_S = 120.0
ONE, TWO, THREE = (f"127.0.0.{number}:7000" for number in (1, 2, 3))


class Place(Protocol):
    """A source, and the world that it tells of."""

    @property
    def source(self) -> AddressSource: ...

    def now(self, *addresses: str) -> None:
        """Workers are at these addresses from now on."""

    def break_(self) -> None:
        """Nobody can be asked, until `now`."""

    @property
    def failed(self) -> int:
        """How often somebody was asked in vain."""


class ListPlace:
    def __init__(self) -> None:
        self.source = StaticSource([ONE, TWO])

    def now(self, *addresses: str) -> None:
        assert set(addresses) == {ONE, TWO}


class DnsPlace:
    """The name server is made up; what asks it is not."""

    def __init__(self) -> None:
        self.source = DnsSource("workers.test", 7000, every_s=0.02, resolve=self._resolve)
        self.failed = 0
        self._addresses: list[str] | OSError = []

    def now(self, *addresses: str) -> None:
        self._addresses = list(addresses)

    def break_(self) -> None:
        self._addresses = socket.gaierror(socket.EAI_AGAIN, "try again")

    async def _resolve(self, name: str, port: int) -> list[str]:
        assert (name, port) == ("workers.test", 7000)
        if isinstance(self._addresses, OSError):
            self.failed += 1
            raise self._addresses
        if not self._addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self._addresses


class KubernetesPlace:
    """One slice for each address, so that scaling adds and deletes slices, too."""

    def __init__(self, api: FakeApi, config_file: str) -> None:
        opened = api_of("decodes", config_file)
        assert opened.namespace == kubernetes_api.NAMESPACE
        self.source = KubernetesSource(
            opened, opened.namespace, kubernetes_api.SERVICE, kubernetes_api.PORT_NAME, runs
        )
        self._api = api
        self._there: set[str] = set()

    @property
    def failed(self) -> int:
        return 1000 - len(self._api.refusals)

    def now(self, *addresses: str) -> None:
        self._api.refusals.clear()
        for address in self._there - set(addresses):
            self._api.delete(address)
        for address in set(addresses) - self._there:
            self._api.put(slice_of(address, endpoint(address.rpartition(":")[0])))
        self._there = set(addresses)

    def break_(self) -> None:
        self._api.refusals[:] = [503] * 1000
        self._api.hang_up()


@contextmanager
def _place(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "kubernetes":
        with kubernetes_api.serving(folder) as (api, config_file):
            yield KubernetesPlace(api, config_file)
    elif kind == "dns":
        yield DnsPlace()
    else:
        yield ListPlace()  # type: ignore[misc]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with _place(request.param, tmp_path) as made:
        yield made


EVERY = pytest.mark.parametrize("place", ["list", "dns", "kubernetes"], indirect=True)
THAT_CHANGES = pytest.mark.parametrize("place", ["dns", "kubernetes"], indirect=True)


@asynccontextmanager
async def watching(source: AddressSource) -> AsyncIterator[AsyncIterator[frozenset[str]]]:
    """Read by a task, as a pool does, and ended by cancelling it."""
    found: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    async def follow() -> None:
        async for addresses in source.watch():
            found.put_nowait(addresses)

    async def told() -> AsyncIterator[frozenset[str]]:
        while True:
            yield await asyncio.wait_for(found.get(), WITHIN_S)

    task = asyncio.create_task(follow())
    try:
        yield told()
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled(), task


@EVERY
async def test_all_addresses_are_told_at_once(place: Place) -> None:
    place.now(ONE, TWO)
    async with watching(place.source) as told:
        assert await anext(told) == {ONE, TWO}


@EVERY
async def test_nothing_is_left_when_nobody_watches(place: Place) -> None:
    place.now(ONE, TWO)
    async with watching(place.source) as told:
        await anext(told)
        for _ in range(1000):
            place.source.look_again()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    await until(
        lambda: not [each for each in threading.enumerate() if each.name.startswith("watch ")]
    )


@THAT_CHANGES
async def test_scale_up_down_and_back(place: Place) -> None:
    place.now(ONE)
    async with watching(place.source) as told:
        seen: set[frozenset[str]] = set()
        for step in ((ONE,), (ONE, TWO, THREE), (THREE,), (ONE, THREE), (), (TWO,)):
            place.now(*step)
            async for addresses in told:
                # Slices change one by one; what is between two steps may be told as well.
                seen.add(addresses)
                if addresses == set(step):
                    break
    assert frozenset() in seen


@THAT_CHANGES
async def test_who_cannot_be_asked_changes_nothing(place: Place) -> None:
    place.now(ONE, TWO)
    async with watching(place.source) as told:
        assert await anext(told) == {ONE, TWO}
        place.break_()
        before = place.failed
        await until(lambda: place.failed >= before + 2)
        place.now(ONE, TWO, THREE)
        assert await anext(told) == {ONE, TWO, THREE}


async def test_one_empty_answer_is_not_believed() -> None:
    asked: list[str] = []

    async def answer(name: str, port: int) -> list[str]:
        asked.append(name)
        if len(asked) in (2, 3, 5):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [ONE] if len(asked) < 6 else [TWO]

    async with watching(DnsSource("x", 1, every_s=0.01, resolve=answer)) as told:
        assert [await anext(told), await anext(told)] == [{ONE}, {TWO}]


async def test_a_doubt_is_looked_into_before_its_time() -> None:
    place = DnsPlace()
    source = DnsSource("workers.test", 7000, every_s=3600, resolve=place._resolve)
    place.now(ONE)
    async with watching(source) as told:
        await anext(told)
        place.now(TWO)
        source.look_again()
        assert await anext(told) == {TWO}


async def test_a_look_up_that_hangs_is_not_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batonlm.router.workers.discovery.LOOKUP_S", 0.02)
    answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
    asked: list[str] = []

    async def hang(name: str, port: int) -> list[str]:
        asked.append(name)
        return await answer if len(asked) == 1 else [TWO]

    async with watching(DnsSource("x", 1, every_s=0.01, resolve=hang)) as told:
        await asyncio.sleep(0.2)
        assert len(asked) == 1
        answer.set_result([ONE])
        assert [await anext(told), await anext(told)] == [{ONE}, {TWO}]


async def test_the_systems_resolver() -> None:
    assert "127.0.0.1:80" in await resolve("localhost", 80)
    with pytest.raises(OSError):
        await resolve("no-such-host.invalid", 80)


async def test_kubernetes_lists_again_when_its_version_is_too_old(tmp_path: Path) -> None:
    with kubernetes_api.serving(tmp_path) as (api, config_file):
        place = KubernetesPlace(api, config_file)
        place.now(ONE)
        async with watching(place.source) as told:
            assert await anext(told) == {ONE}
            await until(lambda: api.watching == 1)
            api.forget()
            place.now(ONE, TWO)
            assert await anext(told) == {ONE, TWO}
        lists = [query for query in api.queries if "watch" not in query]
        assert len(lists) >= 2


async def test_kubernetes_goes_on_from_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watches end often; none begins with a list again, and bookmarks count."""
    monkeypatch.setattr("batonlm.router.workers.discovery_k8s.PAGE", 1)
    with kubernetes_api.serving(tmp_path) as (api, config_file):
        api.longest_watch_s = 0.05
        place = KubernetesPlace(api, config_file)
        place.now(ONE, TWO)
        async with watching(place.source) as told:
            assert await anext(told) == {ONE, TWO}
            api.bookmark()
            await until(lambda: api.queries[-1].get("resourceVersion") == "13")
            place.now(ONE)
            assert await anext(told) == {ONE}
        pages = [query.get("continue") for query in api.queries if "watch" not in query]
        assert pages == [None, "1"]


def test_kubernetes_without_a_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        api_of("decodes", str(tmp_path / "missing"))
    assert caught.value.field == "decodes"


async def test_kubernetes_from_a_pod_takes_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the service account's files over TLS; a renewed token or CA counts, a wrong CA not."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setattr("batonlm.rpc.kubernetes_api.ACCOUNT", tmp_path)
    files = Authority(tmp_path).host("api", "127.0.0.1")
    (tmp_path / "ca.crt").write_bytes(files.ca.read_bytes())
    (tmp_path / "namespace").write_text(kubernetes_api.NAMESPACE)
    (tmp_path / "token").write_text("first")
    with kubernetes_api.serving(tmp_path, files) as (api, _):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        place = KubernetesPlace(api, "")
        place.now(ONE)
        async with watching(place.source) as told:
            assert await anext(told) == {ONE}
            await until(lambda: api.watching == 1)
            place.now(ONE, TWO)
            assert await anext(told) == {ONE, TWO}
            (tmp_path / "token").write_text("second")
            api.hang_up()
            await until(lambda: api.tokens[-1] == "Bearer second")
            await until(lambda: api.watching == 1)
            place.now(TWO)
            assert await anext(told) == {TWO}
        assert set(api.tokens) == {"Bearer first", "Bearer second"}
        other = tmp_path / "other"
        strange = Authority(other).host("api", "127.0.0.1")
        (tmp_path / "ca.crt").write_bytes(strange.ca.read_bytes())
        pod = open_api()
        with pytest.raises(NoAnswer, match="SSLCertVerificationError"):
            pod.request("GET", "/version", {}, (60.0, 60.0))
        (tmp_path / "ca.crt").unlink()
        with pytest.raises(NoAnswer, match="FileNotFoundError"):
            pod.request("GET", "/version", {}, (60.0, 60.0))
        (tmp_path / "ca.crt").write_bytes(files.ca.read_bytes())
        pod.request("GET", "/version", {}, (60.0, 60.0)).close()


def test_kubernetes_without_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'batonlm\[k8s\]'") as caught:
        api_of("decodes")
    assert caught.value.field == "decodes"


@pytest.mark.parametrize(
    ("texts", "target"),
    [
        ((), ListTarget(())),
        (("h:1", "[::1]:2"), ListTarget(("h:1", "[::1]:2"))),
        (("dns:///decode.models.svc:7000",), DnsTarget("decode.models.svc", 7000)),
        (("k8s:///decode:grpc",), ServiceTarget("decode", "", "grpc")),
        (("k8s:///decode.models:7000",), ServiceTarget("decode", "models", "7000")),
    ],
)
def test_how_places_are_written(texts: tuple[str, ...], target: object) -> None:
    assert parse_target(texts, "decodes") == target


@pytest.mark.parametrize(
    "text",
    [
        "h",
        "h:0",
        "h:1,dns:///x:1",
        "dns:///x",
        "dns:///x:grpc",
        "dns:///:1",
        "dns://8.8.8.8/x:1",
        "k8s:///Decode:grpc",
        "k8s:///decode",
        "k8s:///a.b.c:grpc",
        "k8s:///decode:0",
        "http:///x:1",
    ],
)
def test_what_is_no_place_names_the_option(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(decodes=tuple(text.split(",")))
    assert caught.value.field == "decodes"


async def test_every_role_is_where_its_option_says() -> None:
    discovery = await discovery_of(
        RouterConfig(tokenizers=(ONE,), decodes=(TWO,), prefills=("dns:///localhost:7",)).places
    )
    for role, expected in (("tokenizer", {ONE}), ("decode", {TWO}), ("detokenizer", set())):
        async with watching(discovery.source(role)) as told:
            assert await anext(told) == expected
    async with watching(discovery.source("prefill")) as told:
        assert "127.0.0.1:7" in await anext(told)


async def test_live_routers_are_counted() -> None:
    assert Replicas(None).live_replicas() == 1
    assert Replicas(StaticDiscovery({})).live_replicas() == 1
    routers = Listed([ONE, TWO])
    replicas = Replicas(Discovery({"router": routers}))
    following = asyncio.create_task(replicas.run())
    try:
        await until(lambda: replicas.live_replicas() == 2)
        routers.set([])
        await until(lambda: replicas.live_replicas() == 1)
    finally:
        following.cancel()
        await asyncio.wait({following})
