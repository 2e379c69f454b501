"""The authenticator that asks for keys, and the file behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonlm.core.admission.api_keys import KeyBook, TenantLimits, parse, render
from batonlm.core.admission.tenants import ANYONE, OWNER
from batonlm.core.errors import InvalidArgument, Unauthenticated
from batonlm.router.api.access import KeyAuthenticator, OpenAuthenticator
from batonlm.rpc import followed_file


class Kept:
    """A file of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.book = KeyBook()
        self.registry = CollectorRegistry()

    def new(
        self, tenant: str, limits: TenantLimits | None = None, *, operator: bool = False
    ) -> str:
        self.book, key = self.book.with_key(tenant, limits or TenantLimits(), "", operator=operator)
        self.write()
        return key

    def remove(self, tenant: str) -> None:
        (key_id,) = (key.id for key in self.book.keys if key.tenant == tenant)
        self.book = self.book.without(key_id)
        self.write()

    def write(self) -> None:
        fresh = self.path.with_suffix(".fresh")
        fresh.write_text(render(self.book))
        fresh.replace(self.path)

    def authenticator(self) -> KeyAuthenticator:
        return KeyAuthenticator(str(self.path), self.registry)

    def stale(self) -> float | None:
        return self.registry.get_sample_value("baton_api_keys_stale")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    yield Kept(tmp_path / "keys.json")


def test_a_key_opens_the_door_for_its_tenant_only(kept: Kept) -> None:
    limits = TenantLimits(weight=2.0, most_urgent=3, tokens_per_minute=5, max_requests=7)
    one, other = kept.new("one", limits), kept.new("other")
    authenticator = kept.authenticator()
    tenant = authenticator.authenticate([f"Bearer {one}"])
    assert (tenant.name, tenant.weight, tenant.most_urgent) == ("one", 2.0, 3)
    assert (tenant.tokens_per_minute, tenant.max_requests, tenant.max_tokens) == (5, 7, None)
    assert authenticator.authenticate([f"bearer  {other} "]).name == "other"
    assert authenticator.authenticate([f"Bearer {other}"]).cache_salt != tenant.cache_salt
    assert OpenAuthenticator().authenticate([]) is OWNER and OWNER.operator
    assert OpenAuthenticator(public=True).authenticate([]) is ANYONE and not ANYONE.operator


def test_an_operators_key_is_one_only_itself(kept: Kept) -> None:
    plain, staff = kept.new("one"), kept.new("one", operator=True)
    kept.book = parse(render(kept.book))
    authenticator = kept.authenticator()
    assert not authenticator.authenticate([f"Bearer {plain}"]).operator
    tenant = authenticator.authenticate([f"Bearer {staff}"])
    assert tenant.operator and tenant.name == "one"
    assert tenant.cache_salt == authenticator.authenticate([f"Bearer {plain}"]).cache_salt


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["Basic KEY"],
        ["KEY"],
        ["Bearer KEYx"],
        ["Bearer baton-"],
        ["Bearer KEY", "Bearer KEY"],
        ["Bearer KEY Bearer"],
        ["Bearer \xff\xfe"],
        ["Bearer " + "x" * 100_000],
    ],
)
def test_anything_else_does_not(
    kept: Kept, shown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = kept.new("one")
    with pytest.raises(Unauthenticated) as caught:
        kept.authenticator().authenticate([value.replace("KEY", key) for value in shown])
    for told in (caplog.text, caught.value.message):
        assert key not in told and key.removeprefix("baton-") not in told


def test_the_file_is_taken_over_while_the_router_runs(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    one = kept.new("one")
    authenticator = kept.authenticator()
    other = kept.new("other")
    with pytest.raises(Unauthenticated):
        authenticator.authenticate([f"Bearer {other}"])
    authenticator.look()
    assert authenticator.authenticate([f"Bearer {other}"]).name == "other"
    kept.remove("one")
    authenticator.look()
    with pytest.raises(Unauthenticated):
        authenticator.authenticate([f"Bearer {one}"])
    assert kept.registry.get_sample_value("baton_api_keys") == 1
    assert one not in caplog.text and other not in caplog.text


@pytest.mark.parametrize("broken", ["{", "", "{}", None])
def test_a_broken_file_changes_nothing_and_is_told(
    kept: Kept, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key = kept.new("one")
    authenticator = kept.authenticator()
    whole = kept.path.with_suffix(".whole")
    kept.path.rename(whole)
    if broken is not None:
        kept.path.write_text(broken)
    for _ in range(3):
        authenticator.look()
        assert authenticator.authenticate([f"Bearer {key}"]).name == "one"
    assert kept.stale() == 1
    assert caplog.text.count("cannot be used") == 1
    whole.rename(kept.path)
    authenticator.look()
    assert kept.stale() == 0
    assert authenticator.authenticate([f"Bearer {key}"]).name == "one"


def test_a_mounted_secret_is_followed_through_its_links(kept: Kept, tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "..data").symlink_to(tmp_path / "v1")
    (mount / "keys.json").symlink_to(Path("..data") / "keys.json")
    kept.path = tmp_path / "v1" / "keys.json"
    first = kept.new("one")
    authenticator = KeyAuthenticator(str(mount / "keys.json"), kept.registry)
    kept.path = tmp_path / "v2" / "keys.json"
    kept.remove("one")
    second = kept.new("two")
    authenticator.look()
    assert authenticator.authenticate([f"Bearer {first}"]).name == "one"
    (mount / "..fresh").symlink_to(tmp_path / "v2")
    (mount / "..fresh").rename(mount / "..data")
    authenticator.look()
    assert authenticator.authenticate([f"Bearer {second}"]).name == "two"
    with pytest.raises(Unauthenticated):
        authenticator.authenticate([f"Bearer {first}"])


async def test_it_looks_by_itself_until_cancelled(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_file, "LOOK_S", 0.001)
    kept.new("one")
    authenticator = kept.authenticator()
    running = asyncio.create_task(authenticator.run())
    key = kept.new("other")
    async with asyncio.timeout(120):
        while True:
            with suppress(Unauthenticated):
                assert authenticator.authenticate([f"Bearer {key}"]).name == "other"
                break
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


@pytest.mark.parametrize("content", [None, "{", '{"salt": "00"}'])
def test_a_router_does_not_start_with_a_file_it_cannot_use(kept: Kept, content: str | None) -> None:
    if content is not None:
        kept.path.write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        kept.authenticator()
    assert caught.value.field == "keys"
    assert str(kept.path) in caught.value.message
