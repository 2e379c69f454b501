"""Why a probe of a peer failed, in words, and what to do; asks nobody.

Facts, as `baton.cli.kv.probe` tells them, stage by stage: peer, meeting, ours, transport,
memcpy_bytes_per_s, KV chunks, round_trip_s, reads, and done or error at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.cli.checks import Finding, fail
from baton.core.errors import Reason
from baton.transfer.ucx import disjoint

Facts = Mapping[str, Any]

A_WORKER = "give the gRPC address of a prefill or decode worker, or of 'baton doctor kv --listen'"
_DIFFERENT = "not what was announced"


def failure(address: str, stage: str, facts: Facts) -> Finding:
    """stage: the first thing that the probe did not come to tell of."""
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
