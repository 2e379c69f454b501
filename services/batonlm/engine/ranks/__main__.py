"""A rank as a process: `python -m batonlm.engine.ranks`, which `processes` starts."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

import msgspec

from batonlm.engine.config import configure_threads
from batonlm.engine.ranks.link import Link, watch
from batonlm.engine.ranks.processes import RankArguments

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that comes when the thread ends that started this process."""


def main() -> int:
    """The argument is RankArguments in JSON."""
    # A terminal and systemd send these to a worker's children, too. The worker drains on them and
    # needs its ranks until it has.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    arguments = msgspec.json.decode(sys.argv[1], type=RankArguments)
    logging.basicConfig(
        level=logging.WARNING, format=f"rank {arguments.rank} %(levelname)s %(name)s: %(message)s"
    )
    steps = Link(socket.socket(fileno=arguments.steps_fd))
    copies = Link(socket.socket(fileno=arguments.copies_fd))
    # Whatever this rank waits for, without its worker it is of no use. The thread that started it
    # lives as long as the worker; the kernel kills a rank that is stopped, too, and could not end.
    watch([Link(socket.socket(fileno=arguments.watch_fd))], lambda: os._exit(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    group = arguments.group
    configure_threads(group.threads if group.spin else 0)
    if not group.spin:
        os.environ["OMP_NUM_THREADS"] = str(group.threads)

    from batonlm.engine.ranks.group import open_store
    from batonlm.engine.ranks.rank import Rank

    place, where = arguments.place, arguments.store
    store = open_store(where.fd, where.host, where.port, place)
    Rank(place, store, neighbours=group.ranks_of_a_machine, host=where.listen).serve(steps, copies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
