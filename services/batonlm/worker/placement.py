"""Starts `baton-ranks` on machines of a Ray cluster: a `Launcher` for ranks on several machines.

Ray places one actor on each other machine and watches it. The actor is what `baton-ranks` is
elsewhere: it joins the worker by a token and starts that machine's ranks, whose links go to the
worker and not through Ray. Nothing of a step touches Ray.

Ray's driver is a process of its own, `main`, which the worker starts and which ends with it: a
worker imports nothing of Ray, whose driver takes signals over and ends its process when Ray's own
processes do. A driver works on a node of its cluster only; so unless the worker's machine is one,
the driver makes it one, which has nothing to give.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from batonlm.core.errors import Internal, InvalidArgument, install
from batonlm.engine.config import MIB
from batonlm.engine.ranks.link import Link, LinkLost, watch
from batonlm.engine.ranks.machines import Order
from batonlm.engine.ranks.processes import STOP_S, environment
from batonlm.engine.ranks.runner import STEP_S
from batonlm.engine.ranks.tcp import key_of
from batonlm.worker.machine import serve

log = logging.getLogger(__name__)

OWN_NODE = "auto"
FIELD = "ray_address"
"""What the operator calls the cluster."""

POLL_S = 0.5
WARN_S = 15.0
"""How long machines may be missing before the log says so, once."""


class PlacementRequest(msgspec.Struct, frozen=True):
    """What the driver's process is to start."""

    address: str
    """Of the cluster."""
    order: Order
    token: str
    """Of the group, which the actors show the worker."""
    device: str
    """cpu or cuda."""


class PlacedMachines(msgspec.Struct, frozen=True, tag=True):
    """The actors run."""

    nodes: tuple[str, ...]
    """The machines' addresses, from machine 1 on."""
    pids: tuple[int, ...]
    """The actors' processes."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The machines cannot be had, or one of them has ended."""

    message: str
    field: str = ""
    """Of the configuration, or "" for a fault that is not the operator's."""


_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(PlacementRequest).decode
_answer: msgspec.msgpack.Decoder[PlacedMachines | Failed] = msgspec.msgpack.Decoder(
    PlacedMachines | Failed
)


class RayLauncher:
    """See `Launcher`. address: auto, the cluster of which this machine is a node; or host:port of
    the cluster's head. token: of the group; the machines get it from Ray. device: cpu or cuda."""

    def __init__(self, address: str, token: str, device: str):
        self._address, self._token, self._device = address, token, device
        self.watched: list[Link] = []
        self.placed: PlacedMachines | None = None
        self._answers: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, order: Order) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        ours, theirs = zip(*pairs, strict=True)
        self._answers, watched = (Link(end) for end in ours)
        self.watched.append(watched)
        # Not as __main__: Ray sends the actor's class to the machines by the name of its module.
        code = f"from {__name__} import main; main()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, *(str(end.fileno()) for end in theirs)],
                pass_fds=[end.fileno() for end in theirs],
                env=environment(),
                stdin=subprocess.DEVNULL,
                # A worker's own output is read by its supervisor.
                stdout=sys.stderr.fileno(),
            )
        finally:
            for end in theirs:
                end.close()
        with suppress(LinkLost):
            request = PlacementRequest(self._address, order, self._token, self._device)
            self._answers.send(_encode(request), STEP_S)

    @property
    def pids(self) -> list[int]:
        """Of the driver."""
        return [self._process.pid] if self._process else []

    def check(self) -> None:
        link = self._answers
        if link is None or not select.select([link], [], [], 0)[0]:
            return
        try:
            answer = _answer.decode(link.receive(STEP_S))
        except LinkLost:
            raise Internal("Ray's driver has ended") from None
        if isinstance(answer, PlacedMachines):
            self.placed = answer
            log.info("Ray has placed this worker's other machines on %s", ", ".join(answer.nodes))
        elif answer.field:
            raise InvalidArgument(answer.message, field=answer.field)
        else:
            raise Internal(answer.message)

    def close(self) -> None:
        for link in (*self.watched, *([self._answers] if self._answers else [])):
            link.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()


class RanksActor:
    """A machine's ranks, in a process that Ray starts there."""

    def where(self) -> tuple[str, int]:
        """The machine's address and this process's id."""
        from ray import util

        return util.get_node_ip_address(), os.getpid()

    def run(self, leader: tuple[str, int], number: int, token: str, device: str) -> tuple[str, str]:
        """Joins the worker and runs the ranks until either ends. Returns why, and the field of the
        configuration that is wrong, if one is."""
        try:
            serve((leader[0], leader[1]), number, key_of(token, ""), device)
        except InvalidArgument as error:
            return error.message, error.field or FIELD
        except LinkLost:
            return f"cannot join the worker at {leader[0]} port {leader[1]}", "ranks_listen"
        return "its worker or one of its ranks has ended", ""


def main() -> None:
    """The driver: its arguments are descriptors, of the link for messages and of the watched
    one."""
    logging.basicConfig(level=logging.INFO, format="ray %(levelname)s %(name)s: %(message)s")
    answers, watched = (Link(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    ended = threading.Event()

    def stop() -> None:
        ended.set()
        # Ray may be waited for: what it still holds is freed when it notices this process's end.
        threading.Timer(STOP_S, os._exit, (1,)).start()

    watch([watched], stop)
    with suppress(LinkLost):
        request = _request(answers.receive(STEP_S))
        answers.send(_encode(_run(request, answers, ended)), STEP_S)
    # Ray's threads do not hold this process up.
    os._exit(1)


def _run(request: PlacementRequest, answers: Link, ended: threading.Event) -> Failed:
    """Until a machine has ended, or the worker has. Says why."""
    try:
        import ray
    except ImportError:
        return Failed(f"needs the package ray: {install('ray')}", FIELD)
    group: Any = None
    node = None if request.address == OWN_NODE else _start_node(request)
    try:
        try:
            ray.init(request.address, log_to_driver=False, logging_level=logging.WARNING)
        except Exception:
            # Of many kinds: the cluster is not there, is of another version, has another token.
            log.exception("Ray's cluster at %s cannot be used", request.address)
            return Failed(
                f"{request.address} is no Ray cluster that can be used: see the log", FIELD
            )
        # A terminal and systemd send these to all processes of a worker, which then drains. Ray's
        # driver has set a handler of its own.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        group = _placement_group(request)
        if not _is_placed(group, ended):
            return Failed("the worker has ended")
        actors = _actors(request, group)
        places: Sequence[tuple[str, int]] = ray.get([each.where.remote() for each in actors])
        nodes, pids = zip(*places, strict=True)
        answers.send(_encode(PlacedMachines(nodes, pids)), STEP_S)
        order = request.order
        running = [
            each.run.remote(order.leader, number, request.token, request.device)
            for number, each in enumerate(actors, 1)
        ]
        done: list[Any] = []
        while not (done or ended.is_set()):
            done, _ = ray.wait(running, timeout=POLL_S)
        if not done:
            return Failed("the worker has ended")
        message, field = ray.get(done[0])
        log.warning("the machine at %s has ended: %s", nodes[running.index(done[0])], message)
        return Failed(message, field)
    except ray.exceptions.RayError as error:
        log.warning("Ray has lost a machine of this worker: %s", error)
        return Failed("Ray has lost a machine of this worker")
    finally:
        with suppress(Exception):
            if group is not None:
                ray.util.remove_placement_group(group)
            ray.shutdown()
        if node is not None:
            node.terminate()


_NODE = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with the driver.
from ray.scripts.scripts import main
main()
"""


def _start_node(request: PlacementRequest) -> subprocess.Popen[bytes]:
    """Makes this machine a node of the cluster, on which nothing can be placed, until the driver
    ends."""
    flags = {
        "address": request.address,
        # On which the other machines reach this one, too.
        "node-ip-address": request.order.leader[0],
        "num-cpus": "0",
        "num-gpus": "0",
        # The least that Ray takes: what passes Ray is a few hundred bytes.
        "object-store-memory": str(80 * MIB),
    }
    options = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return subprocess.Popen(
        [sys.executable, "-c", _NODE, "start", *options, "--block"],
        stdin=subprocess.DEVNULL,
        # A page of advice. Errors go to stderr.
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _placement_group(request: PlacementRequest) -> Any:
    """A bundle for each machine, no two on one node. That of the worker's own takes nothing but
    its place: the worker has its GPUs already."""
    from ray import util

    # Ray has this resource of each node: 1.0 of the node of an address.
    own = {f"node:{util.get_node_ip_address()}": 0.001}
    bundles = [own, *[_share(request)] * (request.order.machines - 1)]
    return util.placement_group(bundles, strategy="STRICT_SPREAD")


def _share(request: PlacementRequest) -> dict[str, float]:
    kind = "CPU" if request.device == "cpu" else "GPU"
    return {kind: float(request.order.ranks_of_a_machine)}


def _is_placed(group: Any, ended: threading.Event) -> bool:
    """Waits for the machines, as long as the worker does: an autoscaler may have to make them."""
    waited = 0.0
    while not ended.is_set():
        if group.wait(timeout_seconds=POLL_S):
            return True
        waited += POLL_S
        if waited == WARN_S:
            log.warning("no machines in the Ray cluster yet for %s", group.bundle_specs)
    return False


def _actors(request: PlacementRequest, group: Any) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = _share(request)
    kind = ray.remote(RanksActor)
    return [
        kind.options(
            num_cpus=share.get("CPU", 0),
            num_gpus=share.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(1, request.order.machines)
    ]
