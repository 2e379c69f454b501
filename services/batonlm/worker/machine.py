"""`baton-ranks`: a machine of a worker whose model is on several of them.

It joins the worker on the first machine, runs that machine's share of its ranks, and ends with the
worker: whoever restarts this process has it join the next one. SIGTERM is left to the worker, which
needs its ranks until it has drained.

In a LeaderWorkerSet leader and number are found in its variables.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from batonlm.core.errors import InvalidArgument
from batonlm.engine.ranks.link import LinkLost
from batonlm.engine.ranks.machines import Machine
from batonlm.engine.ranks.tcp import Address, key_of
from batonlm.rpc.address import split
from batonlm.rpc.config import load, option
from batonlm.rpc.logs import setup
from batonlm.worker.hardware import claim_for_ranks
from batonlm.worker.options import LEADER_VARIABLE, check_token

NUMBER_VARIABLE = "LWS_WORKER_INDEX"


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """One of a group's machines, but the first."""

    leader: str = option(
        "",
        "the worker's ranks_listen; a host may be left out in a LeaderWorkerSet, as in :50053",
        unit="host:port", required=True,
    )  # fmt: skip
    machine: int = option(
        0, "this machine's number, from 1 on; 0: the LeaderWorkerSet's", minimum=0, maximum=63
    )
    device: str = option("auto", "as the worker's, of this machine's GPUs")
    ranks_token: str = option(
        "", "secret that the machines of a group show each other. Set it in the environment",
        secret=True,
    )  # fmt: skip
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a leader or a number that is neither given nor found."""
        if not (self.machine or os.environ.get(NUMBER_VARIABLE, "").isdecimal()):
            raise InvalidArgument(
                f"is required, because {NUMBER_VARIABLE} is not set", field="machine"
            )
        split(self.address, "leader")
        check_token(self.ranks_token)

    @property
    def address(self) -> str:
        host = os.environ.get(LEADER_VARIABLE, "") if self.leader.startswith(":") else ""
        return host + self.leader

    @property
    def number(self) -> int:
        return self.machine or int(os.environ[NUMBER_VARIABLE])


def serve(leader: Address, number: int, key: bytes, device: str) -> None:
    """Joins a worker as machine `number` and runs that machine's ranks until either ends. Raises
    LinkLost when it cannot join, and InvalidArgument for GPUs that are not there."""
    machine = Machine(leader, number, key)
    claimed = claim_for_ranks(device, machine.size, len(machine.ranks))
    try:
        machine.serve()
    finally:
        if claimed is not None:
            claimed.close()


def main() -> int:
    config = load(MachineConfig, prog="baton-ranks")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    setup("ranks", config.log_level, config.log_json)
    key = key_of(config.ranks_token, os.environ.get(LEADER_VARIABLE, ""))
    try:
        serve(split(config.address, "leader"), config.number, key, config.device)
    except LinkLost:
        print(f"error: leader: {config.address} cannot be joined", file=sys.stderr)
        return 3
    except InvalidArgument as error:
        print(f"error: {error.field}: {error.message}", file=sys.stderr)
        return 2
    return 1


if __name__ == "__main__":
    sys.exit(main())
