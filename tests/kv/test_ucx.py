"""Which ways UCX may take: the whole table of rules, and what UCX is told."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest

from batonlm.core.errors import InvalidArgument
from batonlm.transfer.kv_chunk import POLY, XXH3
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, disjoint, expand

LOCAL, ISOLATED, TRUSTED = KvNetwork
SHARED = {"posix", "sysv", "xpmem", "knem", "cma"}

ON_THE_MACHINE = [
    "sm",
    "shm",
    "mm",
    "posix,self",
    "cma",
    "self",
    "sm,self,cuda_copy",
    "cuda",
    "\\sysv",
]
BEYOND = [
    "tcp", "tcp,self", "sm,tcp", "ib", "rc", "rc_x", "rc_verbs", "ud", "ud_mlx5:aux", "dc", "dc_x",
    "srd", "gga", "ugni", "gaudi", "^sm", "^rc", "^tcp", "sm,self,all", "\\tcp",
]  # fmt: skip


@pytest.mark.parametrize("names", ON_THE_MACHINE)
@pytest.mark.parametrize("network", KvNetwork)
def test_shared_memory_needs_no_declaration(network: KvNetwork, names: str) -> None:
    assert choose(network, transports=names.split(",")).transports == tuple(names.split(","))
    assert choose(network, inherited=names).transports == tuple(names.split(","))


@pytest.mark.parametrize("names", BEYOND)
def test_what_leaves_the_machine_is_refused_unless_declared(names: str) -> None:
    listed = names.split(",")
    for given, field in (({"transports": listed}, "ucx_transports"), ({"inherited": names}, "")):
        with pytest.raises(InvalidArgument, match="--kv-network isolated") as refused:
            choose(LOCAL, **given)
        assert refused.value.field == (field or "UCX_TLS")
        for network in (ISOLATED, TRUSTED):
            assert choose(network, **given).transports == tuple(listed)


@pytest.mark.parametrize("unset", [None, "", "all"])
def test_an_environment_that_allows_everything_is_replaced(unset: str | None) -> None:
    local = expand(choose(LOCAL, inherited=unset).transports, "")
    assert local == SHARED | {"self", "cuda_copy", "cuda_ipc", "gdr_copy"}
    for network in (ISOLATED, TRUSTED):
        found = choose(network, inherited=unset).transports
        assert "all" not in found
        assert expand(found, "") >= SHARED | {"self", "tcp", "rc_mlx5", "ud_mlx5", "cuda_ipc"}


def test_the_option_goes_before_the_environment() -> None:
    assert choose(LOCAL, transports=("sm",), inherited="tcp").transports == ("sm",)


@pytest.mark.parametrize("names", ["nonsense", "tpc,self", "TCP", "sm,,self", "rc*"])
def test_a_name_that_ucx_does_not_have(names: str) -> None:
    """UCX itself would only warn, in a log that nobody sees."""
    with pytest.raises(InvalidArgument, match="has no transport") as refused:
        choose(TRUSTED, inherited=names)
    assert refused.value.field == "UCX_TLS"


def test_devices_belong_to_a_declared_network() -> None:
    assert choose(TRUSTED, devices=("mlx5_0:1",)).devices == ("mlx5_0:1",)
    with pytest.raises(InvalidArgument, match="local") as refused:
        choose(LOCAL, devices=("eth0",))
    assert refused.value.field == "ucx_devices"


def test_a_list_turned_round_is_the_rest() -> None:
    assert "tcp" not in expand(["^tcp"], "") and "rc_mlx5" in expand(["^tcp"], "")
    assert expand(["^ib", "tcp", "cuda_ipc", "ugni", "gaudi"], "") >= SHARED
    assert not expand(["^ib", "tcp"], "") & {"tcp", "rc_verbs"}


def test_seals_by_network() -> None:
    assert [network.digests[0] for network in KvNetwork] == [XXH3, POLY, XXH3]
    assert XXH3 not in ISOLATED.digests
    for network in KvNetwork:
        assert POLY in network.digests


def test_what_two_have_in_common() -> None:
    assert disjoint(("sm", "self"), ("tcp", "self"))
    assert not disjoint(("sm", "tcp"), ("tcp", "self"))
    assert not disjoint(("sm",), ("of another version",))


def test_death_is_found_out_by_what_there_is() -> None:
    assert choose(LOCAL).error_handling == "none"
    assert choose(TRUSTED).error_handling == choose(ISOLATED, inherited="tcp").error_handling
    assert choose(TRUSTED).error_handling == "peer"
    assert choose(TRUSTED, transports=("sm", "self")).error_handling == "none"


def test_reads_of_another_processs_device_memory_do_not_fall_to_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX reads the C library's environment; what the operator has set stays."""
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for variable in ("UCX_TLS", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL", name):
        monkeypatch.setenv(variable, "before")
    Ucx().apply()
    assert getenv(name.encode()) == b"before"
    monkeypatch.delenv(name)
    Ucx().apply()
    assert getenv(name.encode()) == b"y"


def test_the_bundled_ucx_has_the_setting() -> None:
    """It is not documented, and a name that UCX does not know is only ignored."""
    nixl = importlib.util.find_spec("nixl")
    if nixl is None or nixl.origin is None:
        pytest.skip("NIXL is not installed")
    libraries = list(Path(nixl.origin).parents[1].glob("nixl_cu*.libs/ucx/libuct_cuda.so*"))
    assert libraries
    for library in libraries:
        assert b"\0ENABLE_GET_ZCOPY\0" in library.read_bytes()


def test_ucx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "NIXL_LOG_LEVEL"):
        monkeypatch.setenv(name, "before")
    Ucx().apply()
    assert os.environ["UCX_TLS"] == "self,sm,cuda"
    assert os.environ["UCX_NET_DEVICES"] == os.environ["UCX_LOG_LEVEL"] == "before"
    choose(TRUSTED, transports=("rc", "self"), devices=("mlx5_0:1", "mlx5_1:1")).apply()
    assert os.environ["UCX_TLS"] == "rc,self"
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
