"""Drafts by models' own heads, against transformers' `MtpModel` over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_loadtest.quantised import write
from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.speculation import DraftCounts
from batonlm.engine.config import EngineConfig
from batonlm.engine.footprint import foresee
from batonlm.engine.heads.load import FAMILIES, WINDOW
from batonlm.engine.heads.model import MOST_WAITING, HeadModel
from batonlm.engine.loader import load
from batonlm.engine.runner import TorchRunner
from tests.engine.driving import random_prompts
from tests.engine.modes import (
    GREEDY,
    Heard,
    attempt,
    decode_loop,
    hand_over,
    run,
    run_out,
)
from tests.engine.tiny_models import VOCAB, save_tiny_model, save_with_head

DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=11, top_logprobs=0)
PENALISED = replace(DRAWN, repetition_penalty=1.2, frequency_penalty=0.2)
PROMPTS = random_prompts((5, 33, 64, 75, 90, 100), VOCAB)
PLENTY, FEW = 200, 13
"""Blocks for all at once; and for the longest alone, with three to spare."""
LONG = 400
"""Positions of a sequence that a head's window does not hold."""

WithHead = Callable[[str], Path]


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> WithHead:
    """The folder of an architecture's tiny model with a head."""
    root = tmp_path_factory.mktemp("heads")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else save_with_head(arch, path)

    return folder


class Driven:
    """A sequence that a runner with a head computes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = EngineConfig(str(folder), num_blocks=32, heads=True, max_batch=4, **options)
        self.runner = TorchRunner.load(config)
        assert isinstance(self.runner.draft_model, HeadModel)
        self.head = self.runner.draft_model
        self.text: list[int] = []
        self._steps = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Computes positions of which no logits are needed."""
        self._submit(tokens, 0)
        self.text += tokens

    def decode(self, token: int, drafts: Sequence[int] = ()) -> None:
        """Computes one position, and those of drafts, which are all wrong."""
        self._submit([token, *drafts], 1 + len(drafts))
        self.text.append(token)

    def foretell(self, token: int, count: int) -> list[tuple[int, float]]:
        """What the head takes for likely behind the text and this token."""
        found = []
        size = len(self.text)
        first = self.head.start(0, 0)
        assert first is not None
        chunk = Chunk(0, [*self.text, token][first:], first, (), _rows(1))
        while True:
            (guess,), _ = self.head.compute([chunk])
            found.append((guess[0], guess[1]))
            if len(found) == count:
                return found
            chunk = Chunk(0, [guess[0]], size + len(found), (), _rows(1))

    def _submit(self, tokens: Sequence[int], samples: int) -> None:
        drafts = max(0, samples - 1)
        extents = ((0, self.runner.num_blocks),)
        chunk = Chunk(0, list(tokens), len(self.text), extents, _rows(samples), num_drafts=drafts)
        self.runner.submit(StepPlan(self._steps, (chunk,)))
        self.runner.collect()
        self._steps += 1


def _rows(count: int) -> tuple[SampleRow, ...]:
    return tuple(SampleRow(0, 0, i, GREEDY) for i in range(count))


class Reference:
    """transformers' own model and head."""

    def __init__(self, folder: Path, arch: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_layers import MtpModel

        classes: Any = AutoModelForCausalLM
        network = classes.from_pretrained(folder, attn_implementation="eager")
        if arch != "mellum":
            # It looks for the last layer of the published models only.
            network._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
        self.network = network.eval()
        head: Any = MtpModel.from_pretrained(network)
        self.head = head.eval()

    @torch.inference_mode()
    def foretell(self, text: Sequence[int], count: int, start: int = 1) -> list[tuple[int, float]]:
        """The same for a text whose positions from `start` on the head sees."""
        from transformers.cache_utils import MtpCache

        tokens = torch.tensor([text])
        hidden = self.network(tokens, output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=self.network.config.get_mtp_config())
        given, ids = hidden[:, start - 1 : -1], tokens[:, start:]
        positions = torch.arange(start, len(text))[None]
        found = []
        for _ in range(count):
            output = self.head.forward_layer(0, given, positions, cache, input_ids=ids)
            given = output[:, -1:]
            sure, likeliest = self.head._project_to_logits(given)[0, 0].softmax(-1).max(-1)
            found.append((int(likeliest), float(sure)))
            positions, ids = positions[:, -1:] + 1, likeliest[None, None]
        return found


@pytest.fixture
def text() -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(3)
    yield torch.randint(5, VOCAB, (LONG,), generator=generator).tolist()


def same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    sure = pytest.approx([each[1] for each in expected], abs=1e-4)
    return [each[0] for each in found] == [each[0] for each in expected] and sure == [
        each[1] for each in found
    ]


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_head_foretells_what_transformers_does(
    arch: str, text: list[int], with_head: WithHead
) -> None:
    """From the first position on, with wrong drafts in between, and some steps without drafts."""
    driven, reference = Driven(with_head(arch)), Reference(with_head(arch), arch)
    for i, token in enumerate(text[:60]):
        driven.decode(token, text[100 : 100 + i % 4])
        if i % 7 != 3:
            found = driven.foretell(text[i + 1], 3)
            assert same(found, reference.foretell(text[: i + 2], 3)), i
    driven.runner.close()


def test_a_head_begins_where_decoding_does(text: list[int], with_head: WithHead) -> None:
    folder = with_head("glm4_moe")
    driven, reference = Driven(folder), Reference(folder, "glm4_moe")
    driven.prefill(text[:50])
    assert driven.head.start(0, 0) is None
    for i in range(50, 70):
        driven.decode(text[i])
        found = driven.foretell(text[i + 1], 2)
        assert same(found, reference.foretell(text[: i + 2], 2, start=51)), i
    driven.runner.close()


def test_a_head_looks_back_over_a_window(text: list[int], with_head: WithHead) -> None:
    """Blocks go one by one, so between WINDOW - 16 and WINDOW positions are seen."""
    folder = with_head("glm4_moe")
    driven, reference = Driven(folder, max_model_len=512), Reference(folder, "glm4_moe")
    for token in text[: LONG - 1]:
        driven.decode(token)
        if len(driven.text) % MOST_WAITING == 0:
            driven.foretell(text[len(driven.text)], 1)
    found = driven.foretell(text[LONG - 1], 1)
    starts = [start for start in range(LONG - WINDOW - 16, LONG - WINDOW + 32)]
    expected = [reference.foretell(text, 1, start) for start in starts if start % 16 == 1]
    assert any(same(found, each) for each in expected)
    assert not same(found, reference.foretell(text, 1))
    driven.runner.close()


def test_what_a_head_did_not_take_up_in_time_is_left_out(
    text: list[int], with_head: WithHead
) -> None:
    folder = with_head("deepseek_v3")
    driven, reference = Driven(folder), Reference(folder, "deepseek_v3")
    for token in text[:200]:
        driven.decode(token)
    start = 200 - MOST_WAITING + 1
    assert driven.head.start(0, 0) == start
    found = driven.foretell(text[200], 2)
    assert same(found, reference.foretell(text[:201], 2, start))
    driven.runner.close()


def drafting(runner: TorchRunner, num_blocks: int = PLENTY, depth: int = 1) -> EngineLoop:
    policy = SchedulerPolicy(headroom=1, speculation="heads")
    return decode_loop(runner, num_blocks, policy, depth=depth)


def counted(loop: EngineLoop) -> DraftCounts:
    assert loop.scheduler.speculation is not None
    return loop.scheduler.speculation.counts["heads"]


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_head_changes_no_token(arch: str, tmp_path: Path) -> None:
    """One that is always right saves steps; sampled, it is wrong now and then."""
    folder = save_with_head(arch, tmp_path / arch, always_right=True)
    runner = TorchRunner.load(EngineConfig(str(folder), num_blocks=PLENTY, heads=True))
    for sampling in (GREEDY, DRAWN, PENALISED):
        attempts = [
            attempt(f"r{i}", prompt, 40, sampling=sampling) for i, prompt in enumerate(PROMPTS)
        ]
        plain, loop = run(decode_loop(runner, PLENTY), attempts), drafting(runner)
        heard, counts = run(loop, attempts), counted(loop)
        assert heard.tokens == plain.tokens
        assert heard.logprobs == plain.logprobs
        assert 0 < counts.accepted <= counts.drafted
        assert (counts.accepted == counts.drafted) == (sampling is GREEDY)
        assert counts.saved_steps > 0
    runner.close()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.deep), 2])
def test_a_head_changes_no_token_where_sequences_are_preempted(
    depth: int, with_head: WithHead
) -> None:
    runner = TorchRunner.load(
        EngineConfig(str(with_head("glm4_moe")), num_blocks=PLENTY, heads=True)
    )
    attempts = [attempt(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    plain = run(decode_loop(runner, PLENTY), attempts)
    loop = drafting(runner, FEW, depth)
    assert run(loop, attempts).tokens == plain.tokens
    assert sum(loop.scheduler.preemptions.values()) > 0
    assert counted(loop).drafted > 0
    runner.close()


def test_a_head_changes_no_token_behind_a_hand_over(with_head: WithHead) -> None:
    """Prefill has no head, and the same KV."""
    config = EngineConfig(str(with_head("deepseek_v3")), num_blocks=PLENTY)
    sender, taker = TorchRunner.load(config), TorchRunner.load(replace(config, heads=True))
    attempts = [attempt(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    plain, loop, heard = run(decode_loop(sender, PLENTY), attempts), drafting(taker), Heard()
    for one in attempts:
        hand_over(sender, loop, one, heard, 37)
    assert run_out(loop, heard).tokens == plain.tokens
    assert counted(loop).drafted > 0
    sender.close()
    taker.close()


def test_heads_of_quantised_files_are_read(with_head: WithHead, tmp_path: Path) -> None:
    quantised, reference = write("fp8 by block", with_head("deepseek_v3"), tmp_path)
    found, wanted = (
        load(EngineConfig(str(folder), num_blocks=8, heads=True)).head.layers.state_dict()
        for folder in (quantised, reference)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_models_without_heads_are_refused(tmp_path: Path) -> None:
    llama = save_tiny_model("llama", tmp_path / "llama")
    with pytest.raises(InvalidArgument, match="no heads of such models") as error:
        foresee(EngineConfig(str(llama), num_blocks=8, heads=True))
    assert error.value.field == "heads"
    none = save_tiny_model("deepseek_v3", tmp_path / "none", num_nextn_predict_layers=0)
    with pytest.raises(InvalidArgument, match="names no heads") as error:
        foresee(EngineConfig(str(none), num_blocks=8, heads=True))
    assert error.value.field == "heads"
    lacking = save_tiny_model("deepseek_v3", tmp_path / "lacking")
    with pytest.raises(InvalidArgument, match="lack weights of its head") as error:
        TorchRunner.load(EngineConfig(str(lacking), num_blocks=8, heads=True))
    assert error.value.field == "heads"


def test_memory_for_a_head_is_planned(with_head: WithHead) -> None:
    folder = str(with_head("glm4_moe"))
    with_it = foresee(EngineConfig(folder, num_blocks=8, heads=True)).memory.weights_bytes
    without = foresee(EngineConfig(folder, num_blocks=8)).memory.weights_bytes
    head = 64 * 64 * 4
    assert with_it > without + head
