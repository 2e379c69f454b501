"""Which transports of UCX may move KV, and the environment variables that choose them.

Neither NIXL nor UCX is loaded here.

UCX authenticates nobody and encrypts nothing. Where it emulates a read in software, as over TCP, it
serves any address of the whole process, not of the buffers alone; and a key of RDMA is no secret
either. So whatever can be reached from another machine is used only where
the operator has declared the network that KV moves on. Shared memory needs no declaration: who may
attach to it, a process of the same user, may read the process anyway.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from batonlm.core.errors import InvalidArgument
from batonlm.transfer.kv_chunk import POLY, XXH3


class KvNetwork(Enum):
    """What the operator declares of the network between workers."""

    LOCAL = "local"
    """KV stays on this machine."""
    ISOLATED = "isolated"
    """Only Baton's workers reach it, but what arrives may have been changed on purpose."""
    TRUSTED = "trusted"
    """Whoever reaches it is trusted like this process."""

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests that are good enough here, best first."""
        return (POLY,) if self is KvNetwork.ISOLATED else (XXH3, POLY)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MACHINE = _names(
    "self posix sysv xpmem knem cma cuda_copy cuda_ipc gdr_copy rocm_copy rocm_ipc rocm_gdr "
    "ze_copy ze_ipc ze_gdr"
)
# cuda_ipc crosses machines only with memory that was made to be exported within an NVLink domain.
# NIXL is given the staging pool alone, whose memory is plain cuMemAlloc: its handles are good on
# this machine and nowhere else.
_BEYOND = _names(
    "tcp rc_verbs rc_mlx5 rc_gda ud_verbs ud_mlx5 dc_mlx5 gga_mlx5 srd "
    "ugni_smsg ugni_rdma ugni_udt gaudi_gdr"
)
_ALL = _MACHINE | _BEYOND
_SHORT = {
    "sm": "posix sysv xpmem knem cma",
    "shm": "posix sysv xpmem knem cma",
    "mm": "posix sysv xpmem",
    "ib": "rc_verbs ud_verbs rc_mlx5 ud_mlx5 dc_mlx5 gga_mlx5 srd rc_gda",
    "rc": "rc_verbs rc_mlx5 ud_verbs ud_mlx5",
    "rc_v": "rc_verbs ud_verbs",
    "rc_x": "rc_mlx5 ud_mlx5",
    "ud": "ud_verbs ud_mlx5",
    "ud_v": "ud_verbs",
    "ud_x": "ud_mlx5",
    "dc": "dc_mlx5 ud_mlx5",
    "dc_x": "dc_mlx5 ud_mlx5",
    "gga": "gga_mlx5",
    "ugni": "ugni_smsg ugni_rdma ugni_udt",
    "cuda": "cuda_copy cuda_ipc gdr_copy",
    "rocm": "rocm_copy rocm_ipc rocm_gdr",
    "ze": "ze_copy ze_ipc ze_gdr",
    "gaudi": "gaudi_gdr",
}
_ALIASES = {"all": _ALL, **{name: _names(of) for name, of in _SHORT.items()}}
"""As UCX documents UCX_TLS, with what it uses to connect."""

_OWN_CHOICE = {
    KvNetwork.LOCAL: ("self", "sm", "cuda"),
    KvNetwork.ISOLATED: ("self", "sm", "cuda", "ib", "tcp"),
    KvNetwork.TRUSTED: ("self", "sm", "cuda", "ib", "tcp"),
}


@dataclass(frozen=True, slots=True)
class Ucx:
    """How UCX may move KV. Made by `choose`."""

    network: KvNetwork = KvNetwork.LOCAL
    transports: tuple[str, ...] = _OWN_CHOICE[KvNetwork.LOCAL]
    """As UCX_TLS names them."""
    devices: tuple[str, ...] = ()
    """As UCX_NET_DEVICES names them; empty: any."""

    @property
    def error_handling(self) -> str:
        """UCX's name of the way in which a peer's death is found out.

        Its shared memory does not do it in UCX's way, "peer", so that UCX would ask for TCP beside
        it; but a read of a dead process's memory fails at once, which is all that is needed.
        """
        return "peer" if expand(self.transports, "") & _BEYOND else "none"

    def apply(self) -> None:
        """Sets UCX's environment variables. To be called before NIXL is loaded, and only here."""
        os.environ["UCX_TLS"] = ",".join(self.transports)
        if self.devices:
            os.environ["UCX_NET_DEVICES"] = ",".join(self.devices)
        # Without NVLink, UCX would read another process's device memory over TCP.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
        # NIXL and UCX log to standard output and error from the moment they are loaded.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


def choose(
    network: KvNetwork,
    *,
    transports: Sequence[str] = (),
    devices: Sequence[str] = (),
    inherited: str | None = None,
) -> Ucx:
    """The operator's transports, else those inherited, else our own choice.

    transports, devices: of the options ucx_transports and ucx_devices. inherited: UCX_TLS as it is
    in the environment. Raises InvalidArgument for what is not known or not declared.
    """
    if devices and network is KvNetwork.LOCAL:
        raise InvalidArgument(
            "names network devices, but kv_network is local: declare it, or name none",
            field="ucx_devices",
        )
    names, field = tuple(transports), "ucx_transports"
    if not names and inherited not in (None, "", "all"):
        names, field = tuple(str(inherited).split(",")), "UCX_TLS"
    if not names:
        names = _OWN_CHOICE[network]
    beyond = expand(names, field) & _BEYOND
    if beyond and network is KvNetwork.LOCAL:
        raise InvalidArgument(
            f"{','.join(names)} can be reached from other machines ({', '.join(sorted(beyond))}), "
            "and UCX lets whoever reaches it read this process's memory: declare the network with "
            "--kv-network isolated (only Baton's workers reach it) or trusted, or keep to shared "
            "memory (sm)",
            field=field,
        )
    return Ucx(network, names, tuple(devices))


def gpudirect(ucx: Ucx, root: Path = Path("/")) -> bool:
    """Whether a GPU's memory can be read from where KV goes: always on this machine; from another
    one by an RDMA card, for which the kernel needs nvidia_peermem or NVIDIA's open modules. What
    this finds, the self-test proves for this machine only."""
    if ucx.network is KvNetwork.LOCAL:
        return True
    version = root / "proc/driver/nvidia/version"
    is_open = version.is_file() and "Open Kernel Module" in version.read_text()
    return any((root / "sys/class/infiniband").glob("*")) and (
        is_open or (root / "sys/module/nvidia_peermem").exists()
    )


def inherited() -> str | None:
    """UCX_TLS as it was when this process started."""
    return os.environ.get("UCX_TLS")


def expand(names: Sequence[str], field: str) -> frozenset[str]:
    """The transports that a list means: aliases resolved, `^` in front turns it round.

    Raises InvalidArgument naming the field for a name that UCX does not have.
    """
    denied = bool(names) and names[0].startswith("^")
    found: set[str] = set()
    for given in (names[0].removeprefix("^"), *names[1:]) if names else ():
        name = given.strip().removeprefix("\\").removesuffix(":aux")
        if name not in _ALL and name not in _ALIASES:
            raise InvalidArgument(
                f"UCX has no transport {given!r}; it has {', '.join(sorted(_ALL))} "
                f"and for several {', '.join(sorted(_ALIASES))}",
                field=field,
            )
        # A transport of that name comes first: UCX looks there first, too.
        found |= {name} if name in _ALL else _ALIASES[name]
    return _ALL - found if denied else frozenset(found)


def disjoint(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether no transport to another process is in both lists. False where that is not known."""
    try:
        return not (expand(ours, "") & expand(theirs, "")) - {"self"}
    except InvalidArgument:
        return False
