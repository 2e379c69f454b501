"""Findings and advice of `baton doctor kv`, from the facts of its probe and of this machine.

Pure functions. The facts are those that `batonlm.cli.kv.probe` prints, stage by stage: peer,
meeting, ours, transport, memcpy_bytes_per_s, kv_chunks, round_trip_s, reads, and done or error at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batonlm.cli.checks import Finding, fail, ok, warn
from batonlm.cli.kv.fabric import Fabric, Way
from batonlm.core.errors import Reason
from batonlm.transfer.ucx import disjoint


def size(num_bytes: int) -> str:
    for unit, scale in (("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << scale:
            return f"{num_bytes / (1 << scale):.3g} {unit}"
    return f"{num_bytes} B"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def gigabytes(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


Facts = Mapping[str, Any]

A_WORKER = "give the gRPC address of a prefill or decode worker, or of 'baton doctor kv --listen'"
_DIFFERENT = "not what was announced"


def failure(address: str, stage: str, facts: Facts) -> Finding:
    """stage: the first one for which the probe has no facts."""
    reason, message = Reason[facts["error"]["reason"]], str(facts["error"]["message"])
    if stage == "peer":
        if reason is Reason.UNAVAILABLE and facts.get("accepts"):
            return fail(
                f"{address} accepts connections and does not speak gRPC, or not with TLS as here",
                f"{A_WORKER}; with TLS between processes also --tls-cert, --tls-key, --tls-ca and "
                "--peer-role",
            )
        if reason in (Reason.UNAVAILABLE, Reason.DEADLINE_EXCEEDED):
            return fail(
                f"nothing answers at {address}",
                "see that the worker is up, that it listens where this machine reaches it "
                "(--listen 0.0.0.0:PORT --advertise HOST:PORT), and that no firewall is between",
            )
        return fail(f"{address} is no Baton worker: {message}", A_WORKER)
    if stage == "meeting" and reason is Reason.UNIMPLEMENTED:
        role = facts["peer"]["role"]
        return fail(f"this {role} worker gives no KV away", A_WORKER)
    if stage == "transport":
        return _unreachable(message, facts)
    if _DIFFERENT in message:
        return fail(
            f"{message}: the bytes changed on their way",
            "do not serve over this network before that is found; try --ucx-transports tcp,sm,self",
        )
    return fail(message, "see the peer's log; UCX_LOG_LEVEL=info shows UCX's own")


def _unreachable(message: str, facts: Facts) -> Finding:
    ours, theirs = facts["ours"], facts["meeting"]
    if theirs["kv_network"] == "local" and ours["kv_network"] != "local":
        return fail(
            f"{message}: the peer keeps its KV on its own machine",
            f"start it with --kv-network {ours['kv_network']}",
        )
    if theirs["ucx_transports"] and disjoint(ours["ucx_transports"], theirs["ucx_transports"]):
        return fail(
            f"no transport of UCX in common: {','.join(ours['ucx_transports'])} here, "
            f"{','.join(theirs['ucx_transports'])} there",
            "give both the same --kv-network and --ucx-transports",
        )
    if ours["kv_network"] == "local":
        return fail(
            f"{message}: only shared memory was allowed here",
            "the peer is on another machine, or in another container: --kv-network isolated or "
            "trusted on both",
        )
    return fail(
        message,
        "name the device of the network between the two with --ucx-devices on both; over TCP UCX "
        "listens on a port that the system chooses, which no firewall may block",
    )


ENOUGH_MEMLOCK = 64 << 20
SLOW_LINK, SLOW_COPY = 0.4, 0.2
"""Shares of a link's speed, and of memcpy's for shared memory, below which something is wrong."""

_SHARED = frozenset(["posix", "sysv", "xpmem", "knem", "cma", "mm"])
_STAGES = ("peer", "meeting", "transport", "kv_chunks", "done")


def judge(
    address: str, facts: Facts, way: Way | None, fabric: Fabric, devices: Sequence[str]
) -> dict[str, Finding]:
    """Returns findings by name, in order. devices: those that the operator selected."""
    reached = [stage for stage in _STAGES if stage in facts]
    missing = next((stage for stage in _STAGES if stage not in facts), "")
    found: dict[str, Finding] = {}
    judges = {
        "peer": lambda: _peer(address, facts),
        "meeting": lambda: _meeting(facts),
        "transport": lambda: _transport(facts, way, fabric),
        "kv_chunks": lambda: _kv_chunks(facts),
    }
    for stage in reached:
        if stage in judges:
            found[stage] = judges[stage]()
    if "done" in facts and facts["peer"]["has_kv"]:
        found["round trip"] = _round_trip(facts)
        found["bandwidth"] = _bandwidth(facts, way, fabric)
    elif "error" in facts:
        where = "measuring" if missing == "done" else missing
        found[where] = failure(address, missing, facts)
    return found | _machine(fabric, devices)


def _peer(address: str, facts: Facts) -> Finding:
    peer = facts["peer"]
    detail = f"{peer['role']} at {address}, instance id {peer['instance_id'][:8]}"
    if not peer["has_kv"]:
        return fail(f"{detail}, which has no KV", A_WORKER)
    advertised = str(peer["address"])
    if _loopback(advertised) and not _loopback(address):
        return warn(
            f"{detail}, tells others to find it at {advertised}",
            "start it with --advertise HOST:PORT, or no other machine collects from it",
        )
    return ok(detail)


def _meeting(facts: Facts) -> Finding:
    meeting, ours = facts["meeting"], facts["ours"]
    theirs = meeting["kv_network"] or "unknown"
    detail = (
        f"buffers of {size(meeting['buffer_bytes'])} sealed with {meeting['digest']}, "
        f"kv_network {theirs}, answers in {duration(meeting['seconds'])}"
    )
    if theirs not in ("unknown", ours["kv_network"]):
        return warn(
            f"{detail}; it is {ours['kv_network']} here", "declare the same network on both"
        )
    return ok(detail)


def _transport(facts: Facts, way: Way | None, fabric: Fabric) -> Finding:
    if facts["transport"] != "nixl":
        return warn(
            f"{facts['transport']}: NIXL did not work between the two",
            "run 'baton doctor' on both",
        )
    if way is None:
        return ok("nixl; which way UCX took is unknown")
    detail = f"nixl, UCX reads by {way.transport} on {way.device}"
    if way.transport == "tcp" and fabric.active:
        return warn(
            f"{detail}, though there is RDMA: {', '.join(fabric.active)}",
            "see that /dev/infiniband is in both containers, and force it to learn why it is not "
            f"taken: --ucx-transports rc,sm,self,cuda --ucx-devices {fabric.active[0]}"
            if fabric.rdma_files
            else "give the container /dev/infiniband",
        )
    if way.transport in _SHARED and way.software:
        return warn(
            f"{detail}, in software: the peer's processor serves every read",
            "cross-memory attach is not permitted: run both in one PID namespace as one user",
        )
    return ok(detail)


def _kv_chunks(facts: Facts) -> Finding:
    kv_chunks = facts["kv_chunks"]
    return ok(
        f"{kv_chunks['count']} of {size(kv_chunks['bytes'])} verified, "
        f"{duration(kv_chunks['seconds'])} for a hand-over of one"
    )


def _round_trip(facts: Facts) -> Finding:
    return ok(f"{duration(facts['round_trip_s'])} to read 128 bytes of the peer's memory")


def _bandwidth(facts: Facts, way: Way | None, fabric: Fabric) -> Finding:
    rates = [(read["bytes"], read["bytes_per_s"]) for read in facts["reads"]]
    memcpy = facts["memcpy_bytes_per_s"]
    detail = ", ".join(f"{size(n)} {gigabytes(rate)}" for n, rate in rates)
    detail += f" (memcpy {gigabytes(memcpy)})"
    best = max(rate for _, rate in rates)
    link = fabric.mbit(way.device) * 1e6 / 8 if way is not None else 0.0
    if link and best < SLOW_LINK * link:
        detail += f"; the link of {way.device if way else ''} could do {gigabytes(link)}"
        return warn(detail, _speed_up(way, fabric))
    if way is not None and way.transport in _SHARED and best < SLOW_COPY * memcpy:
        return warn(detail, "the processor is busy, or the two share no memory controller")
    return ok(detail)


def _speed_up(way: Way | None, fabric: Fabric) -> str:
    device = fabric.net_device(way.device) if way is not None else None
    if device is not None and device.mtu < 9000:
        return f"the MTU of {device.name} is {device.mtu}: 9000 on both and on the switch"
    return "see what else uses the link, and that both have a core free for it"


def _machine(fabric: Fabric, devices: Sequence[str]) -> dict[str, Finding]:
    """Returns findings of what is wrong with this machine, independent of the peer."""
    found: dict[str, Finding] = {}
    unknown = [name for name in devices if name not in fabric.names]
    if unknown:
        found["devices"] = fail(
            f"there is no {', '.join(unknown)} here",
            f"--ucx-devices or UCX_NET_DEVICES of {', '.join(sorted(fabric.names)) or 'none'}",
        )
    if fabric.rdma and not fabric.active:
        ports = ", ".join(port.name for port in fabric.rdma)
        found["rdma"] = warn(f"no port is active: {ports}", "see the cable, the switch and ibstat")
    elif fabric.rdma and not fabric.rdma_files:
        found["rdma"] = warn(
            f"{', '.join(fabric.active)} cannot be used: /dev/infiniband is missing",
            "in a container --device /dev/infiniband, in Kubernetes a resource of the RDMA plugin",
        )
    if fabric.rdma and fabric.memlock is not None and fabric.memlock < ENOUGH_MEMLOCK:
        found["locked memory"] = warn(
            f"limit {size(fabric.memlock)}, and RDMA locks the ring in memory",
            "ulimit -l unlimited; in a container --cap-add IPC_LOCK or --ulimit memlock=-1",
        )
    return found


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host.startswith("127.") or host in ("localhost", "::1")
