"""`baton chaos kv freeze-kill`: either side is frozen or killed at every point of the protocol.

Each time: the other side survives; its hand-over ends correctly, or with a typed error in time; a
buffer that a frozen peer may still write stays out of use until that peer is back; then both pools
are full again, nothing changed outside the buffers in use, and the next hand-over transfers every
byte.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass

from baton_loadtest.chaos.sides import Settings
from baton_loadtest.chaos.world import (
    PATIENCE_S,
    Broken,
    Peer,
    PeerGone,
    PeerMessage,
    World,
    right,
    until,
)
from baton_loadtest.launch import say
from baton_loadtest.report import Result, at_most, compared
from batonlm.testing.faults import MESSAGE_POINTS, RECEIVER_WORK, SENDER_WORK, TRANSPORT_READ
from batonlm.transfer.stream import Liveness

ONCE = ("opened", "announced", "granted", "refused", "tokens_told", "completed", "reserved")
"""Points that a hand-over reaches once; others are reached with every chunk or KV chunk."""

DEADLINE_S = 12.0
GRACE_S = 2.5
"""A side checks its deadlines once a second, and takes at most another second to close."""

TYPED = {"HandoverFailed", "Overloaded", "DeadlineExceeded", "Unavailable", "Cancelled", "PeerLost"}

PLACES = [
    *((p.partition(".")[0], p) for p in (*MESSAGE_POINTS, *SENDER_WORK, *RECEIVER_WORK)),
    ("receiver", TRANSPORT_READ),
]


@dataclass(slots=True)
class Tally:
    """Counts of runs, or of bytes, unless said otherwise."""

    runs: int = 0
    """Those in which the victim really stopped."""
    survived: int = 0
    ended: int = 0
    longest_s: float = 0.0
    """Until one had ended."""
    full_again: int = 0
    orphaned: int = 0
    kept: int = 0
    changed: int = 0
    served: int = 0
    adjacent: int = 2


def measure(args: argparse.Namespace) -> list[Result]:
    """Raises Broken, with the point, if a required event does not happen."""
    draw, tally = random.Random(args.seed), Tally()
    cases = [(side, point, how) for how in ("freeze", "kill") for side, point in PLACES]
    # Large enough that a read is often in progress when its sender stops.
    settings = Settings(
        transport=args.transport,
        memory=args.memory,
        buffer_bytes=256 << 10,
        layers=32,
        positions=2 * 63,
        state_positions=4 * 63,
        chunk=63,
        # As workers have it: a side that a busy machine lets wait for a second is not dead.
        heartbeat_s=Liveness().heartbeat_s,
    )
    with World(settings, draw, args.ucx_tls) as world:
        world.hand_over()
        while tally.runs < args.count:
            draw.shuffle(cases)
            for side, point, how in cases[: args.count - tally.runs]:
                rule = _rule(how, point, draw)
                try:
                    _run(world, side, rule, tally, full=point.endswith("refused"))
                except (Broken, PeerGone) as error:
                    raise Broken(f"{rule}: {error.message}") from None
                if tally.runs % 20 == 0:
                    say(f"{tally.runs} of {args.count}")
    return [
        Result("runs", tally.runs, ""),
        Result("points, on either side", len(PLACES), ""),
        compared("the other side lived", tally.survived, "", tally.runs, 1.0),
        compared("ended right or with a typed error", tally.ended, "", tally.runs, 1.0),
        at_most("until they had ended, longest", tally.longest_s, "s", DEADLINE_S + GRACE_S),
        Result("runs with a buffer orphaned", tally.orphaned, ""),
        compared("of these, kept until the peer was back", tally.kept, "", tally.orphaned, 1.0)
        if tally.orphaned
        else Result("of these, kept until the peer was back", 0, ""),
        compared("rings full again", tally.full_again, "", tally.runs, 1.0),
        at_most("bytes changed outside buffers in use", tally.changed, "", 0),
        Result("guards next to the ring, at least", tally.adjacent, ""),
        compared("the next hand-over brought every byte", tally.served, "", tally.runs, 1.0),
    ]


def _rule(how: str, point: str, draw: random.Random) -> str:
    most = 1 if point.partition(".")[2] in ONCE else 3
    return f"{how}@{point}:at={draw.randint(1, most)}"


def _run(world: World, side: str, rule: str, tally: Tally, *, full: bool) -> None:
    victim = world.peers[side]
    other = world.receiver if side == "sender" else world.sender
    for peer in (victim, other):
        peer.ask("reset")
        # A fault whose point was not reached last time must not happen now.
        peer.ask("arm", faults="")
    handover_id = world.new_id()
    victim.ask("arm", faults=rule)
    world.offer(handover_id, DEADLINE_S)
    began = time.monotonic()
    given = world.sender.begin("outcome", id=handover_id)
    taken = world.collect(handover_id, DEADLINE_S, full=full)
    until(
        lambda: victim.frozen or not victim.alive or (given.done() and taken.done()),
        "the point to be reached",
    )
    if victim.alive and not victim.frozen:
        # Several chunks in one message can leave later points unreached.
        world.settle()
        return
    tally.runs += 1
    theirs, ours = (given, taken) if side == "sender" else (taken, given)
    ending = _outcome(ours, other.role)
    seconds = time.monotonic() - began
    tally.longest_s = max(tally.longest_s, seconds)
    orphaned = other.ask("state")["orphaned"]
    if rule.startswith("freeze"):
        _thaw(victim, other, orphaned, tally)
        ending_there = _outcome(theirs, victim.role)
    else:
        world.start(side)
        ending_there = "killed"
    if "wrong" in (ending, ending_there):
        say(f"{rule}: {ending} and {ending_there}, {seconds:.1f} s")
    else:
        tally.ended += 1
    tally.survived += other.alive
    world.settle()
    tally.full_again += 1
    for peer in (other, world.peers[side]):
        # A new process has unfilled buffers; its guards are checked all the same.
        if peer is other or rule.startswith("freeze"):
            state = peer.ask("state", look=True)
            tally.changed += state["changed"]
            tally.adjacent = min(tally.adjacent, state["guards"])
    if victim.alive:
        victim.ask("arm", faults="")
    tally.served += right(world.hand_over(), world.settings.moved)


def _thaw(victim: Peer, other: Peer, orphaned: int, tally: Tally) -> None:
    if orphaned:
        tally.orphaned += 1
        time.sleep(0.3)
        tally.kept += other.ask("state")["orphaned"] == orphaned
    victim.thaw()


def _outcome(answer: Future[PeerMessage], role: str) -> str:
    """Returns completed, the error's name, or "wrong" for an outcome that is not allowed."""
    try:
        outcome = answer.result(PATIENCE_S)
    except (PeerGone, TimeoutError):
        return "wrong"
    if role == "receiver":
        clean = outcome["wrong"] == outcome["changed"] == 0
        fine = outcome["outcome"] in TYPED or outcome["outcome"] == "completed"
        return str(outcome["outcome"]) if clean and fine else "wrong"
    fine = outcome["outcome"] == "completed" or outcome["error"] in TYPED
    return str(outcome["outcome"]) if fine else "wrong"
