"""How rounds are counted and contenders compared."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from baton_loadtest.bench import engine
from baton_loadtest.bench.engine import Ranking, agreement, line_up


def _answer(tokens: int, seconds: float) -> dict[str, object]:
    return {"tokens": [[1] * tokens], "seconds": seconds, "cpu_seconds": 2 * seconds}


def test_a_standing_is_its_median_round() -> None:
    standing = Ranking()
    for seconds in (1.0, 4.0, 2.0):
        standing.add(_answer(8, seconds))
    assert median(standing.speeds) == 4.0
    assert median(standing.cpu_speeds) == 2.0


def test_everyone_gets_one_round_and_more_only_in_its_time() -> None:
    standing = Ranking()
    assert standing.has_time(1.0)
    standing.add(_answer(1, 6.0))
    assert standing.has_time(12.0)
    assert not standing.has_time(11.9)
    standing.add(_answer(1, 6.0))
    assert standing.has_time(18.0)
    assert not standing.has_time(17.9)


def test_agreement_counts_equal_answers_and_equal_beginnings() -> None:
    ours = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert agreement(ours, ours) == (1.0, 3.0)
    assert agreement(ours, [[1, 2, 3], [4, 0, 6]]) == (0.5, 2.0)


def test_rivals_take_part_when_asked() -> None:
    def names(
        precisions: tuple[str, ...] = (), *, peers: bool = False, llama: str = ""
    ) -> set[str]:
        found = line_up(Path("m"), precisions=precisions, peers_too=peers, llama=llama)
        return {contender.name for contender in found}

    alone = {engine.EXACT, engine.PLAIN}
    rivals = {engine.CONTINUOUS, *engine.STATIC.values()}
    assert names() == alone
    assert names(("int8", "int4")) == alone | {"Baton int8", "Baton int4"}
    assert names(peers=True) == alone | rivals
    assert names(peers=True, llama="lib") == alone | rivals | set(engine.LLAMA.values())
