"""Single steps are timed on memory that was written, with plans that a runner accepts."""

from __future__ import annotations

from baton.core.scheduler.plan import StepPlan
from baton.testing.fake_runner import FakeRunner
from baton_loadtest.bench.engines import StepTimer


class _Watched(FakeRunner):
    """Keeps the plans it is given."""

    def __init__(self) -> None:
        super().__init__(num_blocks=20, block_size=16)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)


def test_all_memory_is_written_first() -> None:
    runner = _Watched()
    StepTimer(runner)
    positions = 20 * 16
    out = memoryview(bytearray(positions * runner.layout.bytes_per_position))
    runner.pack(((0, 20),), 0, positions, out)
    size = runner.layout.bytes_per_position
    never_written = b"\xff" * size
    assert all(out[i : i + size] != never_written for i in range(0, len(out), size))


def test_a_decode_step_gives_every_sequence_its_own_context() -> None:
    runner = _Watched()
    timer = StepTimer(runner)
    assert timer.decode(4, 64, least=2, seconds=0.0) > 0
    for plan in runner.plans:
        assert [chunk.first_position for chunk in plan.chunks] == [64] * 4
        assert [len(chunk.token_ids) for chunk in plan.chunks] == [1] * 4
    assert len(runner.plans) == 3


def test_a_prompt_is_computed_whole_and_sampled_once() -> None:
    runner = _Watched()
    timer = StepTimer(runner)
    timer.prefill(100, 48)
    spans = [(p.chunks[0].first_position, p.chunks[0].end_position) for p in runner.plans]
    assert spans == [(0, 48), (48, 96), (96, 100)]
    assert [len(p.chunks[0].samples) for p in runner.plans] == [0, 0, 1]


def test_what_does_not_fit_is_known() -> None:
    timer = StepTimer(_Watched())
    assert timer.fits(4, 79)
    assert not timer.fits(4, 80)
    assert not timer.fits(1, 2048)
