"""Under which Host an address without keys answers."""

from __future__ import annotations

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import AllowedHosts

OWN = (
    "localhost", "localhost:8000", "LocalHost:1", "localhost.", "a.localhost", "b.a.localhost:80",
    "127.0.0.1", "127.0.0.1:65535", "127.9.9.9", "[::1]", "[::1]:8000",
)  # fmt: skip
ADDRESSES = ("10.0.0.7", "10.0.0.7:8000", "0.0.0.0:8000", "[fd00::7]:8000", "192.0.2.1:80")
STRANGE = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "notlocalhost", "evil-localhost", "localhost@evil.example", "evil.example#localhost",
    "localhost:evil", "localhost, evil.example", "localhost evil.example", "http://localhost",
    "localhost/", "", " ", ":8000", "[]", "[::1", "2130706433", "0x7f.1", "127.1", "[::1].evil",
    "localhost\x00", "localhost\n", "lo\xe7alhost", "evil.example.:80", ".localhost.evil",
)  # fmt: skip


def allows(listen: str, header: str, *named: str) -> bool:
    return AllowedHosts(listen, named).allow([header.encode("latin-1")])


@pytest.mark.parametrize("listen", ["127.0.0.1:8000", "localhost:1", "[::1]:8000"])
def test_on_loopback_only_its_own_names(listen: str) -> None:
    assert all(allows(listen, host) for host in OWN)
    for host in (*ADDRESSES, *STRANGE):
        assert not allows(listen, host), host


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000", "10.0.0.7:8000", "[fd00::7]:1"])
def test_where_others_reach_it_also_addresses_which_no_name_can_pose_as(listen: str) -> None:
    assert all(allows(listen, host) for host in (*OWN, *ADDRESSES))
    for host in STRANGE:
        assert not allows(listen, host), host


def test_a_name_that_it_listens_on_is_its_own() -> None:
    assert allows("box.lan:8000", "BOX.lan:8000")
    assert not allows("box.lan:8000", "other.lan:8000")


@pytest.mark.parametrize(
    ("named", "allowed", "refused"),
    [
        ("baton.example", ("baton.example", "BATON.example.:80"), ("a.baton.example", "example")),
        ("Baton.Example.", ("baton.example:8000",), ("baton.example.evil",)),
        ("*.example", ("a.example", "b.a.example:1"), ("example", "evilexample", "a.example.evil")),
        ("192.0.2.7", ("192.0.2.7:80",), ("192.0.2.8", "x.192.0.2.7")),
        ("fd00:0::7", ("[fd00::7]:8000", "[fd00:0:0::7]"), ("[fd00::8]",)),
        ("[fd00::7]", ("[fd00::7]",), ("[fd00::8]",)),
        ("*", ("anything.example", "evil.example:80", "", "a b"), ()),
    ],
)
def test_what_is_named_is_allowed_besides(
    named: str, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    for host in (*allowed, *OWN):
        assert allows("127.0.0.1:1", host, named), host
    for host in refused:
        assert not allows("127.0.0.1:1", host, named), host


@pytest.mark.parametrize("named", ["", "*"])
def test_no_host_is_none_that_is_known_and_all_of_several_have_to_be(named: str) -> None:
    hosts = AllowedHosts("127.0.0.1:1", [named] if named else [])
    assert not hosts.allow([])
    assert hosts.allow([b"localhost", b"127.0.0.1"])
    assert hosts.allow([b"localhost", b"evil.example"]) == bool(named)


@pytest.mark.parametrize(
    "named", ["", "a b", "a:80", "http://a", "a/b", "*a", "a.*", "*.", "a..b", "[a]", "é", "*.*"]
)
def test_what_is_no_name_is_refused_at_the_start(named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AllowedHosts("127.0.0.1:1", [named])
    assert caught.value.field == "allowed_hosts"
