"""A sender's and a receiver's process together, and what is done with both."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from baton_loadtest.chaos.peers import PATIENCE_S, Peer, Said, result, until
from baton_loadtest.chaos.settings import Settings


class World:
    """Both are started with it and end with it."""

    def __init__(self, settings: Settings, draw: random.Random, ucx_tls: str = "") -> None:
        self.settings, self.draw, self.ucx_tls = settings, draw, ucx_tls
        self.peers: dict[str, Peer] = {}
        for role in ("sender", "receiver"):
            self.start(role)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for peer in self.peers.values():
            peer.end()

    @property
    def sender(self) -> Peer:
        return self.peers["sender"]

    @property
    def receiver(self) -> Peer:
        return self.peers["receiver"]

    def start(self, role: str) -> None:
        """A new process in place of the one there was."""
        if role in self.peers:
            self.peers.pop(role).end()
        self.peers[role] = Peer(role, self.settings, self.ucx_tls)

    def new_id(self) -> str:
        return self.draw.randbytes(16).hex()

    def offer(self, handover_id: str, deadline_s: float = PATIENCE_S, **more: Any) -> Said:
        return self.sender.ask(
            "offer",
            id=handover_id,
            receiver=self.receiver.instance_id,
            positions=self.settings.positions,
            deadline_s=deadline_s,
            **more,
        )

    def collect(
        self, handover_id: str, deadline_s: float = PATIENCE_S, **more: Any
    ) -> Future[Said]:
        return self.receiver.begin(
            "collect",
            id=handover_id,
            instance_id=self.sender.instance_id,
            address=self.sender.address,
            positions=self.settings.positions,
            deadline_s=deadline_s,
            **more,
        )

    def hand_over(self, *, sender: Said | None = None, receiver: Said | None = None) -> Said:
        """One hand-over from offer to end, and what the receiver says of it."""
        handover_id = self.new_id()
        offered = self.offer(handover_id, **(sender or {}))
        said = result(self.collect(handover_id, **(receiver or {})), "a hand-over to end")
        return {**said, "given": offered["injected"]}

    def settle(self) -> None:
        """Returns when both are idle with all buffers free. Raises Broken if that never comes."""

        def settled() -> bool:
            states = [peer.ask("state") for peer in self.peers.values()]
            return all(state["idle"] and state["free"] == state["buffers"] for state in states)

        until(settled, "both sides to be idle with full rings")


def right(said: Said, positions: int) -> bool:
    """Everything was collected and every byte is what it must be."""
    return (said["outcome"], said["unpacked"], said["wrong"], said["changed"]) == (
        "completed", positions, 0, 0
    )  # fmt: skip
