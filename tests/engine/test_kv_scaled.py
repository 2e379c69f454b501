"""KV kept in one byte a number, with a scale for each position and head: what it is defined to be,
in memory, in models and in every mode of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.attempt import SequenceKey
from batonlm.core.request.model import SCALED, SCALED_FP8
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine import selfcheck
from batonlm.engine.attention.interface import AttentionContext, LayerArguments
from batonlm.engine.checkpoint import UnsupportedModel
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.kv import cache as kv_cache
from batonlm.engine.kv import scaled
from batonlm.engine.kv.cache import DTYPES, Parts, as_tensor, parts_of, recoded
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.runner import TorchRunner
from gpucheck.definition import attention
from tests.engine.bundled import BUNDLED, conversation
from tests.engine.driving import GREEDY, random_prompts
from tests.engine.local_ranks import LocalRanks
from tests.engine.modes import Heard, asked, attempt, decode_loop, hand_over, run, run_out
from tests.engine.tiny_models import VOCAB

NEW_TOKENS = 32
PROMPTS = random_prompts((5, 33, 64, 75, 90, 100), VOCAB)


def rows(count: int, size: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """Normal numbers, whose rows differ in size by powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(count, 1, generator=generator))
    return torch.randn(count, size, generator=generator) * sizes


def there_and_back(numbers: torch.Tensor, kept: str) -> torch.Tensor:
    return scaled.widened(*scaled.narrowed(numbers, DTYPES[kept]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", SCALED)
def test_a_number_is_the_nearest_that_its_row_has(kept: str, dtype: torch.dtype) -> None:
    given = rows(300, 64, 1, spread=4.0).to(dtype)
    codes, scales = scaled.narrowed(given, DTYPES[kept])
    assert codes.dtype == scales.dtype == DTYPES[kept]
    assert (codes.shape, scales.shape) == ((300, 64), (300, 1))
    back = scaled.widened(codes, scales).double()
    # All numbers of the format, times each row's scale.
    every = torch.arange(-127, 128).double()
    if kept == SCALED_FP8:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        every = every[every.isfinite()]
    factors = torch.exp2(scales.view(torch.uint8).double() - 127)
    there = every[None] * factors
    nearest = (given.double()[:, :, None] - there[:, None]).abs().amin(2)
    assert torch.equal((back - given.double()).abs(), nearest)
    largest = given.abs().double().amax(1) / factors[:, 0]
    limit = float(every.max())
    assert limit == scaled.LARGEST[DTYPES[kept]]
    assert bool(((largest > limit / 2) & (largest <= limit)).all())


@pytest.mark.parametrize("kept", SCALED)
def test_numbers_survive_being_widened_and_narrowed_again(kept: str) -> None:
    """So do they a wire of floats between two pools that keep them narrow."""
    once = there_and_back(rows(500, 48, 2, spread=8.0), kept)
    for wire in (torch.float32, torch.bfloat16):
        assert torch.equal(there_and_back(once.to(wire), kept), once)


@pytest.mark.parametrize("kept", SCALED)
def test_a_row_depends_on_itself_alone_and_what_is_no_number_shows_in_it(kept: str) -> None:
    given = rows(6, 32, 3)
    given[0], given[1] = 0, given[1] * 1e-38
    dtype = DTYPES[kept]
    wanted = scaled.narrowed(given, dtype)
    given[2, 7], given[3, 31] = torch.nan, -torch.inf
    got = scaled.narrowed(given, dtype)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one[[0, 1, 4, 5]], other[[0, 1, 4, 5]])
    back = scaled.widened(*got)
    assert bool(back[2:4].isnan().all())
    assert bool((back[0] == 0).all())
    zeros = torch.zeros(2, 4, dtype=dtype)
    assert not scaled.widened(zeros, zeros[:, :1]).any()


@pytest.fixture(scope="module", params=["int8", "fp8"])
def runner(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> TorchRunner:
    return load(saved("llama"), request.param)


def load(folder: Path, kept: str) -> TorchRunner:
    return TorchRunner.load(
        EngineConfig(str(folder), num_blocks=200, kv_cache_dtype=kept, swap_host_bytes=1 << 22)
    )


def bundled(kept: str) -> TorchRunner:
    return TorchRunner.load(EngineConfig(str(BUNDLED), num_blocks=40, kv_cache_dtype=kept))


def test_memory_and_its_plan_are_a_quarter_of_float32s(runner: TorchRunner) -> None:
    layout = runner.layout
    assert layout.dtype in SCALED
    rows = layout.num_layers * layout.num_kv_heads
    assert layout.bytes_per_position == rows * (layout.key_size + layout.value_size + 2)
    config = EngineConfig(str(BUNDLED), kv_memory_bytes=1 << 20)
    wide = foresee(config).memory
    kept = layout.dtype.removesuffix("_scaled")
    narrow = foresee(EngineConfig(str(BUNDLED), kv_memory_bytes=1 << 20, kv_cache_dtype=kept))
    assert wide.block_bytes * (64 + 1) == narrow.memory.block_bytes * 64 * 4
    opened, other = bundled(kept), bundled("auto")
    assert opened.memory.block_bytes == narrow.memory.block_bytes
    assert opened.layout.difference(other.layout)
    for each in (opened, other):
        each.close()


def test_tokens_and_their_bits_are_the_same_in_every_mode(
    runner: TorchRunner, saved: Callable[[str], Path]
) -> None:
    """Alone; together, chunked, with shared prefixes, preempted and swapped; and handed over."""
    assert runner.exact, runner.not_exact_because
    attempts = [attempt(f"r{i}", prompt, NEW_TOKENS) for i, prompt in enumerate(PROMPTS)]
    keys = [SequenceKey(one.request_id, 0, 0) for one in attempts]
    alone = [run(decode_loop(runner, 100), [one]) for one in attempts]
    crowded = decode_loop(runner, 12)
    together = run(crowded, attempts)
    assert crowded.scheduler.preemptions["swap_host"] > 0
    assert asked(crowded)["swapped in"] > 0
    again = run(decode_loop(runner, 100), [attempt("a", PROMPTS[2], 1), attempts[2]])
    choices = run(decode_loop(runner, 100), [attempt("c", PROMPTS[1], NEW_TOKENS, choices=(0, 1))])
    for key, own in zip(keys, alone, strict=True):
        assert len(own.tokens[key]) == NEW_TOKENS
        assert together.tokens[key] == own.tokens[key]
        assert together.logprobs[key] == own.logprobs[key]
    assert again.logprobs[keys[2]] == alone[2].logprobs[keys[2]]
    for choice in (0, 1):
        assert choices.tokens[SequenceKey("c", choice, 0)] == alone[1].tokens[keys[1]]
    receiver = load(saved("llama"), runner.layout.dtype.removesuffix("_scaled"))
    loop = decode_loop(receiver, 100)
    heard = Heard(attempts)
    for one in attempts:
        hand_over(runner, loop, one, heard, 20)
    run_out(loop, heard)
    for key, own in zip(keys, alone, strict=True):
        assert heard.tokens[key][-(NEW_TOKENS - 1) :] == own.tokens[key][1:]
        bits = heard.logprobs[key]
        assert bits == own.logprobs[key][-len(bits) :]


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_latents_are_refused_in_the_pool_and_may_travel(
    kept: str, saved: Callable[[str], Path]
) -> None:
    folder = str(saved("deepseek_v3"))
    with pytest.raises(InvalidArgument, match="latents") as refused:
        TorchRunner.load(EngineConfig(folder, num_blocks=24, kv_cache_dtype=kept))
    assert refused.value.field == "kv_cache_dtype"
    opened = TorchRunner.load(EngineConfig(folder, num_blocks=24, kv_wire_dtype=kept))
    (prompt,) = random_prompts([40], VOCAB)
    here, there = ((0, 8),), ((10, 8),)
    opened.forward(StepPlan(0, (Chunk(0, prompt, 0, here, (SampleRow(0, 0, 0, GREEDY),)),)))
    payload, back = (bytearray(40 * opened.layout.bytes_per_position) for _ in range(2))
    opened.pack(here, 0, 40, memoryview(payload))
    opened.unpack(there, 0, 40, memoryview(payload))
    opened.pack(there, 0, 40, memoryview(back))
    opened.close()
    assert opened.layout.value_size == 0 and any(payload)
    # In fp8, a row whose largest number was rounded down to 224 gets the next lower scale.
    layout = opened.layout
    one, other = (
        recoded(parts_of(layout, 40, as_tensor(layout, 40, memoryview(sent))), torch.float32)[0]
        for sent in (payload, back)
    )
    assert torch.equal(one, other)


def test_codes_and_scales_travel(runner: TorchRunner) -> None:
    (prompt,) = random_prompts([80], VOCAB)
    here, there = ((0, 8),), ((50, 8),)
    runner.forward(StepPlan(0, (Chunk(0, prompt, 0, here, (SampleRow(0, 0, 0, GREEDY),)),)))
    payload = bytearray(80 * runner.layout.bytes_per_position)
    runner.pack(here, 0, 80, memoryview(payload))
    runner.unpack(there, 0, 80, memoryview(payload))
    back = bytearray(len(payload))
    runner.pack(there, 0, 80, memoryview(back))
    assert back == payload and any(payload)


@cache
def logprobs_of(kept: str) -> torch.Tensor:
    """What the bundled model says in a conversation of the kind that it was trained on."""
    text, opened, found = conversation(200), bundled(kept), []
    for end in range(16, len(text), 16):
        chunk = Chunk(0, text[:end], 0, ((0, 20),), (SampleRow(0, 0, 0, GREEDY),))
        found.append(opened.forward(StepPlan(0, (chunk,)))[0].clone())
    opened.close()
    return torch.log_softmax(torch.stack(found), -1)


@pytest.mark.parametrize(("narrow_name", "limit"), [("int8", 0.001), ("fp8", 0.01)])
def test_a_trained_model_hardly_notices(narrow_name: str, limit: float) -> None:
    wide, narrow = logprobs_of("auto"), logprobs_of(narrow_name)
    divergence = (wide.exp() * (wide - narrow)).sum(-1)
    assert float(divergence.mean()) < limit
    assert int((wide.argmax(-1) == narrow.argmax(-1)).sum()) >= len(wide) - 1
    assert not torch.equal(wide, narrow)


@pytest.mark.parametrize("kept", SCALED)
def test_the_check_at_load_expects_what_codes_stand_for(kept: str) -> None:
    """By attention's definition; and refuses a model for whose attention that does not stand."""
    sinks = torch.tensor([0.5, -0.5])
    arguments = LayerArguments(0, 0.25, 3, 4.0, sinks)
    query, key, value = rows(10, 16, 1).view(2, 5, 16), rows(5, 16, 2)[None], rows(5, 16, 3)[None]
    defined = partial(attention, query, scale=0.25, window=3, softcap=4.0, sinks=sinks)

    def run(text: list[int], context: AttentionContext) -> torch.Tensor:
        return context(arguments, query, key, value).flatten(1)

    own = defined(key, value).flatten(1).float()
    (got,), rounding = selfcheck.with_scaled_kv(run, [[1]], [own], DTYPES[kept])
    narrow = [there_and_back(part, kept) for part in (key, value)]
    wanted = defined(*narrow).flatten(1).float()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert float((got - own).abs().max()) == rounding > 1e-4
    with pytest.raises(UnsupportedModel, match="whole prompts"):
        selfcheck.with_scaled_kv(run, [[1]], [own + 0.1], DTYPES[kept])


@pytest.mark.parametrize(
    ("kept", "part"),
    [
        *(("int8", "keys"), ("fp8", "values")),
        pytest.param("int8", "values", marks=pytest.mark.deep),
        pytest.param("fp8", "keys", marks=pytest.mark.deep),
    ],
)
def test_the_check_at_load_finds_a_wrong_scale(
    kept: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one head, by the least that there is: a factor of 2. Without it, the model loads in the
    tests above."""

    def planted(parts: Parts, dtype: torch.dtype) -> Parts:
        found = recoded(parts, dtype)
        if parts[0].is_floating_point() and not dtype.is_floating_point:
            found[2 if part == "keys" else 3][0] += 1
        return found

    config = EngineConfig(str(BUNDLED), num_blocks=16, kv_cache_dtype=kept)
    monkeypatch.setattr(kv_cache, "recoded", planted)
    with pytest.raises(UnsupportedModel, match="packed prompts"):
        TorchRunner.load(config)


@pytest.mark.deep
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_ranks_share_out_codes_and_scales(kept: str, saved: Callable[[str], Path]) -> None:
    """Two ranks of each of two stages, from one that has all heads and layers, and back."""
    config = EngineConfig(str(saved("llama")), num_blocks=100, threads=1, kv_cache_dtype=kept)
    whole, ranks = TorchRunner.load(config), RankedRunner.open(LocalRanks(2, 2), config)
    try:
        attempts = [attempt(f"r{i}", prompt, NEW_TOKENS) for i, prompt in enumerate(PROMPTS)]
        wanted = run(decode_loop(whole, 100), attempts).tokens
        assert run(decode_loop(ranks, 100), attempts).tokens == wanted
        for sender, receiver in ((whole, ranks), (ranks, whole)):
            loop, heard = decode_loop(receiver, 100), Heard(attempts)
            for one in attempts:
                hand_over(sender, loop, one, heard, 20)
            run_out(loop, heard)
            for key, tokens in heard.tokens.items():
                assert tokens[-(NEW_TOKENS - 1) :] == wanted[key][1:]
    finally:
        ranks.close()
        whole.close()
