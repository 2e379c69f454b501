"""What a section gets to work with. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton_loadtest.report import Result


class Skip(Exception):
    """The section cannot run here, and that is no failure. The message says why."""


@dataclass(frozen=True)
class Check:
    """One run of one part."""

    device: str = "cuda"
    """cuda, or cpu: a rehearsal with tiny shapes, Triton's kernels interpreted."""
    quick: bool = False
    """Fewer and smaller cases."""
    part: str = ""
    known: Mapping[str, float] = field(default_factory=dict)
    """Figures of earlier sections, by name."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def speed(
        self, name: str, value: float, unit: str, of: str = "", goal: float | None = None
    ) -> Result:
        """A figure of which more is better. of: the earlier figure that it is a share of; goal:
        the least share. Where that figure was not measured there is neither.

        A rehearsal compares, but judges no speed.
        """
        ceiling = self.known.get(of)
        if ceiling is None:
            return Result(name, value, unit)
        ratio = value / ceiling
        if goal is None or not self.on_gpu:
            return Result(name, value, unit, ceiling, ratio)
        return Result(name, value, unit, ceiling, ratio, goal, ratio >= goal)

    def duration(self, name: str, value: float, unit: str, goal: float) -> Result:
        """A figure of which less is better, with the largest value that is good enough."""
        if not self.on_gpu:
            return Result(name, value, unit)
        return Result(name, value, unit, goal=goal, met=value <= goal)
