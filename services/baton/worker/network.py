"""What a worker's options say of the network that KV moves on; the rules are
`baton.transfer.ucx`'s."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.errors import InvalidArgument
from baton.rpc.address import is_loopback, split
from baton.transfer.ucx import KvNetwork, Ucx, choose, inherited
from baton.worker.options import WorkerOptions


def ucx_of(options: WorkerOptions) -> Ucx:
    """What UCX may do in this worker. Raises InvalidArgument naming the option at fault."""
    if options.transport == "loopback":
        return Ucx()
    reached = [
        split(address, field)[0]
        for address, field in ((options.listen, "listen"), (options.advertise, "advertise"))
        if address
    ]
    return choose(
        network_of(options.kv_network, reached),
        transports=options.ucx_transports,
        devices=options.ucx_devices,
        inherited=inherited(),
    )


def network_of(declared: str, hosts: Sequence[str]) -> KvNetwork:
    """The declared network; undeclared: this machine, as long as all of `hosts` are loopback.

    Raises InvalidArgument otherwise: hand-overs would run where anybody can read this process, or
    fail one by one.
    """
    if declared != "auto":
        return KvNetwork(declared)
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond:
        raise InvalidArgument(
            f"must be declared, because {beyond[0]} is reached from other machines: isolated when "
            "only Baton's workers reach the network that KV moves on, trusted when everybody on it "
            "is trusted with this process's memory, local to hand over on this machine only",
            field="kv_network",
        )
    return KvNetwork.LOCAL
