"""Makes a trace into requests for the simulator, scaled as asked; reads no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidArgument
from baton.core.kvcache.prefix import UNIT_TOKENS
from baton_loadtest.simulator.requests import Request
from baton_loadtest.traces import BLOCK, Recorded


@dataclass(frozen=True, slots=True)
class Scale:
    """rate: times the trace's. lengths: times its tokens, of prompts and outputs. copies: of the
    trace side by side, which share nothing; each begins elsewhere in it. seconds: of it; 0: all.

    Raises InvalidArgument.
    """

    rate: float = 1.0
    lengths: float = 1.0
    copies: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < float("inf"):
            raise InvalidArgument("must be more than 0", field="rate")
        if self.copies < 1:
            raise InvalidArgument("must be at least 1", field="copies")
        if not 0.0 <= self.seconds < float("inf"):
            raise InvalidArgument("must not be below 0", field="seconds")
        if self.stretch < UNIT_TOKENS or self.stretch % UNIT_TOKENS:
            raise InvalidArgument(
                f"must be a multiple of {UNIT_TOKENS / BLOCK:g}: a part of a prompt that another "
                f"one shares stays a multiple of {UNIT_TOKENS} tokens",
                field="lengths",
            )

    @property
    def stretch(self) -> int:
        """Tokens that one of a trace's ids stands for now."""
        whole = self.lengths * BLOCK
        return round(whole) if whole == round(whole) else -1


def requests(trace: Sequence[Recorded], scale: Scale) -> list[Request]:
    """In order of arrival, from 0 on. trace: at least one, in any order."""
    trace = sorted(trace, key=lambda one: one.at_s)
    began = trace[0].at_s
    if scale.seconds:
        trace = [one for one in trace if one.at_s - began < scale.seconds * scale.rate]
    # A last gap like the others, so that copies do not begin at an end.
    length = (trace[-1].at_s - began) * len(trace) / max(1, len(trace) - 1) or 1.0
    apart = 1 + max((max(one.blocks, default=0) for one in trace), default=0)
    found = []
    for copy in range(scale.copies):
        shift = length * copy / scale.copies
        for one in trace:
            found.append(
                Request(
                    (one.at_s - began + shift) % length / scale.rate,
                    max(1, round(one.prompt_tokens * scale.lengths)),
                    max(1, round(one.output_tokens * scale.lengths)),
                    tuple(name + copy * apart for name in one.blocks) if copy else one.blocks,
                    scale.stretch,
                )
            )
    return sorted(found, key=lambda request: request.arrival)
