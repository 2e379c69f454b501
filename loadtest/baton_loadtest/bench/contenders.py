"""Who takes part in `baton bench engine`, and the rounds they run; judges nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from baton_loadtest.bench.process import ContenderFailed, call, say
from baton_loadtest.bench.workload import Workload

STEP_TOKENS = 512
DEADLINE_S = 600.0

EXACT = "Baton float32, exact"
PLAIN = "Baton float32, not exact"
INT8 = "Baton int8"
CONTINUOUS = "transformers continuous batching"
STATIC = {size: f"transformers generate, batches of {size}" for size in (8, 32)}
LLAMA = "llama.cpp float16"


@dataclass(frozen=True, slots=True)
class Contender:
    """module: of this package, which is run with `job` and what all are given. python: by whom."""

    name: str
    module: str
    job: dict[str, Any]
    python: str = ""


@dataclass(slots=True)
class Ranking:
    """What a contender has done so far. tokens: of its last round, for the requests it answered."""

    tokens: list[list[int]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    cpu_speeds: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Output tokens a second, the median round."""
        return median(self.speeds)

    @property
    def cpu_speed(self) -> float:
        """Output tokens per second of processor time, the median round."""
        return median(self.cpu_speeds)

    def add(self, answer: dict[str, Any]) -> None:
        self.tokens = answer["tokens"]
        count = sum(map(len, self.tokens))
        self.speeds.append(count / answer["seconds"])
        self.cpu_speeds.append(count / answer["cpu_seconds"])
        self.seconds += answer["seconds"]

    def has_time(self, seconds: float) -> bool:
        """Whether one more round like the ones before stays below so many seconds in all."""
        rounds = len(self.speeds)
        return self.seconds * (rounds + 1) <= seconds * max(rounds, 1)


def line_up(model: Path, *, int8: bool, peers: bool, llama_python: str) -> list[Contender]:
    """The contenders in their order."""
    found = [
        Contender(EXACT, "ours", {"exact": True, "quantize": "none"}),
        Contender(PLAIN, "ours", {"exact": False, "quantize": "none"}),
    ]
    if int8:
        found.append(Contender(INT8, "ours", {"exact": False, "quantize": "int8"}))
    if peers:
        found.append(Contender(CONTINUOUS, "peer_transformers", {"batch": 0}))
        for size, name in STATIC.items():
            found.append(Contender(name, "peer_transformers", {"batch": size}))
    if llama_python:
        gguf = {"gguf": str(model / "float16.gguf")}
        found.append(Contender(LLAMA, "peer_llama", gguf, llama_python))
    return found


def compete(
    contenders: list[Contender],
    model: Path,
    workload: Workload,
    warm: Workload,
    *,
    threads: int,
    rounds: int,
    seconds: float,
) -> dict[str, Ranking]:
    """Runs everyone's first round, then everyone's second, and so on, one at a time.

    After its first round a contender runs only while all its rounds stay below `seconds`. One that
    fails is told of and left out; when Baton itself does, ContenderFailed is raised.
    """
    shared = {
        "model": str(model),
        "threads": threads,
        "step_tokens": STEP_TOKENS,
        "seconds": seconds,
        "workload": asdict(workload),
        "warm": asdict(warm),
    }
    standings = {contender.name: Ranking() for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            standing = standings.get(contender.name)
            if standing is None or not standing.has_time(seconds):
                continue
            try:
                answer = call(
                    contender.module,
                    {**shared, **contender.job},
                    threads=threads,
                    deadline_s=DEADLINE_S,
                    python=contender.python,
                )
            except ContenderFailed as error:
                if contender.name in (EXACT, PLAIN):
                    raise
                say(f"{contender.name} is left out: {error.message}")
                del standings[contender.name]
                continue
            standing.add(answer)
            say(
                f"round {number + 1}, {contender.name}: {standing.speeds[-1]:.1f} tokens/s "
                f"in {answer['seconds']:.0f} s"
            )
    return standings
