"""A rolling upgrade across two builds, with real processes: what does not fit is kept apart.

Prefill and decode are replaced one after the other, in each order, under load. Every stream ends
with the tokens it has when nothing happens.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from batonlm.transfer import nixl
from tests.e2e.relay import Answer, options, until_it_comes_about
from tests.e2e.rollout import Asked, Load, Rollout

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not nixl.available(), reason="no NIXL here"),
]

STEP = "--fake-step-ms 5"
ORDERS = pytest.mark.parametrize(
    "order", [("prefill", "decode"), pytest.param(("decode", "prefill"), marks=pytest.mark.slow)]
)
DIFFERENCES = ("wire", pytest.param("dtype", marks=pytest.mark.slow))


def requests(max_tokens: int = 60, count: int = 6) -> list[Asked]:
    """Every other one sampled, one of two choices; no two have a prefix in common."""
    return [
        (
            list(range(60 + number, 260 + number)),
            options(
                max_tokens=max_tokens,
                temperature=float(number % 2),
                seed=number,
                n=2 if number == 3 else 1,
            ),
        )
        for number in range(count)
    ]


def builds(tmp_path: Path, old: str, new: str, **flags: str) -> Rollout:
    words = {f"{role}_{i}": STEP for role in ("prefill", "decode") for i in (0, 1)}
    for name, more in flags.items():
        words[name] += f" {more}"
    return Rollout(tmp_path, old=old, new=new, **words)


def came(rollout: Rollout, decode: str) -> dict[str, float]:
    """Attempts of a decode worker by where their KV came from."""
    return {
        source: rollout.metric(decode, "baton_kv_source_total", source=source)
        for source in ("handover", "local", "moved")
    }


def failed(rollout: Rollout, *workers: str) -> float:
    return sum(
        rollout.metric(worker, "baton_handovers_total", outcome="failed") for worker in workers
    )


def check(answers: list[tuple[int, Answer]], expected: list[Answer]) -> None:
    for number, answer in answers:
        assert answer.token_ids == expected[number].token_ids
        assert (answer.text, answer.finish) == (expected[number].text, expected[number].finish)


def half_way(rollout: Rollout, load: Load, role: str) -> tuple[dict[str, float], dict[str, float]]:
    """Replaces one role under load. Where the KV of the decode worker there is then comes from,
    before and after it has served more streams beside the other role's old build."""
    load.goes_on()
    assert rollout.replace(role) == 0
    load.goes_on()
    decode = "decode-1" if role == "decode" else "decode-0"
    # Not before: a worker that leaves refuses what it is given before the router knows.
    before, lost = came(rollout, decode), failed(rollout, decode)
    load.goes_on()
    now = came(rollout, decode)
    assert failed(rollout, decode) == lost, "nobody was paired with whom it does not fit"
    return before, now


@ORDERS
def test_versions_that_overlap_hand_over_in_the_common_one(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    asked = requests(max_tokens=120)

    def what_ran_moved() -> bool:
        """Whether what ran on the old decode worker came to the new one with its KV."""
        with builds(tmp_path, "wire=1-2", "wire=2-3") as rollout:
            expected = [rollout.ask(*one) for one in asked]
            load = Load(rollout, asked)
            before, now = half_way(rollout, load, order[0])
            assert now["handover"] > before["handover"]
            assert now["local"] == before["local"]
            assert rollout.replace(order[1]) == 0
            load.goes_on()
            check(load.end(), expected)
            rollout.idle("prefill-1", "decode-1")
            return came(rollout, "decode-1")["moved"] > 0

    until_it_comes_about(what_ran_moved, "streams on a worker that leaves")


@ORDERS
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_versions_that_do_not_overlap_are_kept_apart(
    tmp_path: Path, order: tuple[str, str], difference: str
) -> None:
    """Between the two replacements decode prefills by itself; afterwards KV moves again."""
    asked, other = requests(), {"prefill_1": "--kv-wire-dtype bfloat16"}
    other["decode_1"] = other["prefill_1"]
    made = (
        builds(tmp_path, "wire=1-1", "wire=2-2")
        if difference == "wire"
        else builds(tmp_path, "", "", **other)
    )
    with made as rollout:
        expected = [rollout.ask(*one) for one in asked]
        load = Load(rollout, asked)
        before, now = half_way(rollout, load, order[0])
        assert now["local"] > before["local"]
        assert now["handover"] == before["handover"]
        assert rollout.replace(order[1]) == 0
        before = came(rollout, "decode-1")
        load.goes_on()
        assert came(rollout, "decode-1")["handover"] > before["handover"]
        check(load.end(), expected)
        rollout.idle("prefill-1", "decode-1")
        assert came(rollout, "decode-1")["moved"] == 0
        assert failed(rollout, "prefill-1", "decode-1") == 0
        assert rollout.metric("router-0", "baton_moves_total") == 0


@pytest.mark.slow
def test_old_and_new_run_side_by_side_without_being_mixed(tmp_path: Path) -> None:
    """A canary: two of each, each pair on its own."""
    asked = requests()
    with builds(tmp_path, "wire=1-1", "wire=2-2") as rollout:
        expected = [rollout.ask(*one) for one in asked]
        rollout.start("prefill-1", "decode-1")
        rollout.serves(prefill=2, decode=2)
        load = Load(rollout, asked)
        load.goes_on(4, lambda: came(rollout, "decode-1")["handover"] > 0)
        check(load.end(), expected)
        rollout.idle("prefill-0", "prefill-1", "decode-0", "decode-1")
        for i in ("0", "1"):
            given = rollout.metric(f"prefill-{i}", "baton_handovers_total", outcome="completed")
            assert given == sum(came(rollout, f"decode-{i}").values()) > 0
        assert rollout.metric("router-0", "baton_local_prefill_total") == 0


def test_what_outlasts_the_drain_is_computed_again_on_the_new_build(tmp_path: Path) -> None:
    """Its KV fits nowhere any more, its tokens do."""
    asked = requests(max_tokens=600)[:3]

    def it_had_to_cut() -> bool:
        flags = {"decode_0": "--drain-timeout-s 1"}
        with builds(tmp_path, "wire=1-1", "wire=2-2", **flags) as rollout:
            expected = [rollout.ask(*one) for one in asked]
            load = Load(rollout, asked)
            rollout.start("prefill-1", "decode-1")
            rollout.serves(prefill=2, decode=2)
            load.goes_on(1, lambda: rollout.metric("decode-0", "baton_sequences") > 0)
            code = rollout.leave("decode-0")
            load.goes_on(1)
            check(load.end(), expected)
            assert rollout.metric("router-0", "baton_moves_total") == 0
            assert came(rollout, "decode-1")["moved"] == 0
            rollout.idle("prefill-0", "prefill-1", "decode-1")
            return code == 1 and rollout.metric("router-0", "baton_migrations_total") > 0

    until_it_comes_about(it_had_to_cut, "streams that outlast the drain")


def test_no_stream_goes_on_with_another_model(tmp_path: Path) -> None:
    """The same name, another digest: every stream is one model's or the other's from its first
    token to its last, and none of those that the drain leaves time for fails."""
    asked = requests()
    with builds(tmp_path, "", "model=another") as rollout:
        old = [rollout.ask(*one).token_ids for one in asked]
        load = Load(rollout, asked)
        load.goes_on()
        for role in ("decode", "prefill"):
            assert rollout.replace(role) == 0
            load.goes_on()
        answers = load.end()
        new = [rollout.ask(*one).token_ids for one in asked]
        assert all(a != b for a, b in zip(old, new, strict=True))
        for number, answer in answers:
            assert answer.token_ids in (old[number], new[number])
        assert {n for n, answer in answers[-6:] if answer.token_ids == new[n]}
        rollout.idle("prefill-1", "decode-1")


def test_a_stream_whose_model_is_gone_ends_with_a_retryable_error(tmp_path: Path) -> None:
    (asked,) = requests(max_tokens=1500, count=1)

    def its_model_went() -> bool:
        flags = {"decode_0": "--drain-timeout-s 0"}
        with builds(tmp_path, "", "model=another", **flags) as rollout:
            rollout.start("decode-1")
            first = rollout.stream(*asked)
            for _ in zip(range(3), first, strict=False):
                pass
            rollout.serves(decode=2)
            rollout.leave("decode-0")
            try:
                list(first)
            except grpc.RpcError as ended:
                assert ended.code() is grpc.StatusCode.UNAVAILABLE
                assert "model" in str(ended.details())
                return True
            return False

    until_it_comes_about(its_model_went, "a stream that runs when its model goes")
