"""Runs attempts through a scheduler on a real model, and tells in which modes they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.request.attempt import Attempt, Logprobs, SequenceKey
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.drafts import Drafter
from batonlm.core.scheduler.events import Event, FirstTokens, KvComplete, NewTokens, Planned
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import PENDING, CompiledGrammar, ModelRunner, StepPlan, StepResult
from batonlm.core.scheduler.policy import PREFILL, SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from tests.core.attempts import Outputs

GREEDY = SamplingParams(temperature=0.0, top_logprobs=2)
"""With the probabilities of what was drawn and of its best rivals: in exact mode, bit for bit."""


class Watched:
    """A ModelRunner that counts what its plans ask for. depth: how many steps are in flight."""

    def __init__(self, runner: ModelRunner, depth: int):
        self._runner = runner
        self.depth = depth
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> None:
        self.asked["copies"] += len(plan.copies)
        self.asked["states"] += sum(len(chunk.state_copies) for chunk in plan.chunks)
        self.asked["swapped out"] += sum(len(swap.blocks) for swap in plan.swap_out)
        self.asked["swapped in"] += sum(len(swap.blocks) for swap in plan.swap_in)
        self.asked["drafts"] += sum(chunk.num_drafts for chunk in plan.chunks)
        self.asked["pending"] += sum(tuple(c.token_ids) == (PENDING,) for c in plan.chunks)
        self.asked["most chunks"] = max(self.asked["most chunks"], len(plan.chunks))
        self._runner.submit(plan)

    def collect(self) -> StepResult:
        return self._runner.collect()


class Heard(Outputs):
    """NewTokens with their probabilities, and what was told about the attempts."""

    def __init__(self, resumed: Iterable[Attempt] = ()) -> None:
        """resumed: attempts that go on behind tokens of other workers."""
        super().__init__()
        for one in resumed:
            self.expect(one)
        self.logprobs: dict[SequenceKey, list[Logprobs]] = {}
        self.cached: dict[str, int] = {}
        """Per request, input tokens whose KV was there."""

    def expect(self, resumed: Attempt) -> None:
        """Takes what was accepted before as if it had been told."""
        accepted = resumed.token_ids[resumed.num_prompt_tokens :]
        keys = resumed.keys()
        self.tokens |= {key: list(accepted) for key in keys}

    def take(self, events: list[Event]) -> Heard:
        super().take(events)
        for event in events:
            if isinstance(event, KvComplete):
                self.cached[event.key.request_id] = event.cached_tokens
            for made in event.tokens if isinstance(event, NewTokens) else ():
                self.logprobs.setdefault(made.key, []).extend(made.logprobs)
        return self


def attempt(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: SamplingParams = GREEDY,
    choices: tuple[int, ...] = (0,),
    accepted: Sequence[int] = (),
    priority: int = 0,
    adapter: str = "",
) -> Attempt:
    """Ends after max_tokens, whatever is drawn."""
    return Attempt(
        name,
        0,
        choices,
        (*prompt, *accepted),
        len(prompt),
        sampling,
        StopParams(max_tokens, ignore_eos=True),
        priority=priority,
        adapter=adapter,
    )


def decode_loop(
    runner: ModelRunner,
    num_blocks: int,
    policy: SchedulerPolicy | None = None,
    *,
    depth: int = 1,
    drafter: Drafter | None = None,
) -> EngineLoop:
    """Over the first num_blocks of a runner's memory, with hardly any headroom."""
    scheduler = Scheduler(
        BlockPool(
            num_blocks,
            runner.block_size,
            state_positions=runner.layout.state_positions,
            stepwise=getattr(runner, "stepwise", False),
        ),
        policy or SchedulerPolicy(headroom=1),
        runner.model,
        num_swap_blocks=runner.num_swap_blocks,
        draft_model=getattr(runner, "draft_model", None),
        drafter=drafter,
    )
    return EngineLoop(Watched(runner, depth), scheduler)


def asked(loop: EngineLoop) -> Counter[str]:
    """What the plans of a loop asked its runner for."""
    assert isinstance(loop.runner, Watched)
    return loop.runner.asked


def run_out(loop: EngineLoop, heard: Heard, *, most: int = 3000) -> Heard:
    """Steps until nothing is left; the books agree after each step."""
    for number in range(most):
        heard.take(loop.step(number * 0.01))
        loop.idle_check()
        if not loop.scheduler.has_work:
            assert loop.in_flight == 0
            return heard
    raise AssertionError(f"still at work after {most} steps")


def run(loop: EngineLoop, attempts: Sequence[Attempt]) -> Heard:
    for one in attempts:
        loop.scheduler.add(one, 0.0)
    return run_out(loop, Heard(attempts))


def hand_over(
    sender: ModelRunner,
    loop: EngineLoop,
    one: Attempt,
    heard: Heard,
    budget: int,
    grammar: CompiledGrammar | None = None,
) -> None:
    """Prefills in chunks of `budget` on another worker; the loop steps on until it has room."""
    scheduler = Scheduler(
        BlockPool(sender.num_blocks, sender.block_size),
        replace(PREFILL, token_budget=budget),
        sender.model,
    )
    prefill = EngineLoop(sender, scheduler)
    scheduler.add(one, 0.0, keep=True, grammar=grammar)
    planned: list[Planned] = []
    first: list[FirstTokens] = []
    while not first:
        events = prefill.step(1.0)
        planned += [event for event in events if isinstance(event, Planned)]
        first = [event for event in events if isinstance(event, FirstTokens)]
    while (needed := loop.scheduler.reserve(one, 0.0, grammar=grammar)) is None:
        assert loop.scheduler.has_work, "refused though nobody else is there"
        heard.take(loop.step(0.0))
    count = len(one.token_ids) - needed
    if count:
        payload = bytearray(count * sender.layout.bytes_per_position)
        sender.pack(planned[0].extents, needed, count, memoryview(payload))
        loop.runner.unpack(loop.scheduler.extents(one.key), needed, count, memoryview(payload))
    loop.scheduler.admit(one.key, first[0].tokens, 0.0)
    scheduler.release(one.key)
    prefill.idle_check()
