"""Adapters in batches that mix them: transformers' tokens with each, bits, memory, refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton_loadtest.quantised import write
from batonlm.core.errors import Internal, InvalidArgument, NotFound, Overloaded
from batonlm.core.kvcache.block_pool import blocks_for
from batonlm.core.request.attempt import SequenceKey
from batonlm.core.scheduler.plan import Chunk, SampleRow, StepPlan
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from tests.engine.adapters import ALL, expected, save_adapter
from tests.engine.driving import GREEDY, generate, random_prompts, scattered
from tests.engine.modes import attempt, decode_loop, run
from tests.engine.tiny_models import VOCAB

LENGTHS = (3, 17, 40, 16, 33, 8)
NEW = 6
BLOCKS = 4
MIB = 1 << 20
SaveModel = Callable[[str], Path]


def opened(folder: Path, **settings: Any) -> TorchRunner:
    given = {"num_blocks": 64, "adapter_memory_bytes": 8 * MIB, **settings}
    return TorchRunner.load(EngineConfig(str(folder), **given))


def adapters_of(arch: str, folder: Path) -> list[Path]:
    """Three that differ in all that changes an answer."""
    return [
        save_adapter(arch, folder / "one", seed=1),
        save_adapter(arch, folder / "two", seed=2, rank=5, use_rslora=True, lora_alpha=3),
        save_adapter(arch, folder / "three", seed=3, rank=16, dtype=torch.bfloat16),
    ]


def answers(
    runner: TorchRunner, adapters: Sequence[str], prompts: list[list[int]], *, chunk: int = 10_000
) -> list[list[int]]:
    """All prompts at once, each with the adapter of its index."""
    blocks = BLOCKS + blocks_for(runner.layout.state_positions, runner.block_size)
    tables = scattered(len(prompts), blocks)
    return generate(runner, prompts, tables, NEW, chunk=chunk, adapters=adapters)


def check(arch: str, folder: Path, place: Path, **settings: Any) -> TorchRunner:
    """Tokens of a batch that mixes three adapters and none equal those of transformers."""
    runner = opened(folder, **settings)
    paths = adapters_of(arch, place)
    digests = ["", *(runner.load_adapter(path).digest for path in paths)]
    prompts = random_prompts(LENGTHS, VOCAB)
    order = [1, 0, 3, 2, 1, 3]
    alone = {i: expected(arch, path, prompts, NEW) for i, path in enumerate([None, *paths])}
    assert len({tuple(texts[0]) for texts in alone.values()}) == len(alone)
    wanted = [alone[which][i] for i, which in enumerate(order)]
    adapters = [digests[which] for which in order]
    for chunk in (10_000, 7):
        assert answers(runner, adapters, prompts, chunk=chunk) == wanted
    assert answers(runner, [""] * len(prompts), prompts) == alone[0]
    return runner


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {}),
        ("gpt2", {}),
        pytest.param("llama", {"decoder": "transformers"}, marks=pytest.mark.deep),
        pytest.param("llama", {"exact": False}, marks=pytest.mark.deep),
        *(
            pytest.param(arch, {}, marks=pytest.mark.deep)
            for arch in ("qwen2", "qwen3", "phi3", "mixtral", "gpt_oss", "gemma2", "deepseek_v3")
        ),
        *(
            pytest.param(arch, {}, marks=pytest.mark.deep)
            for arch in ("stablelm", "falcon", "qwen3_next", "lfm2", "jamba")
        ),
        pytest.param("mamba2", {"num_blocks": 512}, marks=pytest.mark.deep),
    ],
)
def test_every_sequence_gets_its_own_adapter(
    arch: str, settings: dict[str, Any], saved: SaveModel, tmp_path: Path
) -> None:
    check(arch, saved(arch), tmp_path, **settings)


@pytest.mark.deep
@pytest.mark.parametrize("arch", ["lfm2", "qwen3_next"])
def test_a_kept_state_is_found_with_its_own_adapter_only(
    arch: str, saved: SaveModel, tmp_path: Path
) -> None:
    runner = opened(saved(arch), num_blocks=1024)
    paths = [None, *(save_adapter(arch, tmp_path / str(seed), seed=seed) for seed in (1, 2))]
    digests = ["" if path is None else runner.load_adapter(path).digest for path in paths]
    loop = decode_loop(runner, 1024)
    for digest in digests[1:]:
        loop.add_adapter(digest)
    prompts = random_prompts((150,), VOCAB)
    wanted = [expected(arch, path, prompts, NEW) for path in paths]
    assert len({tuple(tokens) for (tokens,) in wanted}) == len(paths)
    found = []
    for number in range(2 * len(paths)):
        which = number % len(paths)
        heard = run(loop, [attempt(f"r{number}", prompts[0], NEW, adapter=digests[which])])
        assert [heard.tokens[SequenceKey(f"r{number}", 0, 0)]] == wanted[which]
        found.append(heard.cached[f"r{number}"])
    assert found == [0, 0, 0, 128, 128, 128]


@pytest.mark.deep
def test_adapters_lie_over_weights_that_stay_quantised(saved: SaveModel, tmp_path: Path) -> None:
    path = save_adapter("llama", tmp_path / "adapter")
    prompts = random_prompts(LENGTHS, VOCAB)
    found = []
    for folder in write("gptq", saved("llama"), tmp_path):
        runner = opened(folder)
        digest = runner.load_adapter(path).digest
        found.append(answers(runner, [digest, ""] * 3, prompts))
    assert found[0] == found[1]


def logits(runner: TorchRunner, chunks: Sequence[Chunk]) -> torch.Tensor:
    return runner.forward(StepPlan(0, tuple(chunks))).clone()


def test_bits_do_not_depend_on_the_neighbours_adapters(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"))
    assert runner.exact, runner.not_exact_because
    digests = ["", *(runner.load_adapter(path).digest for path in adapters_of("llama", tmp_path))]
    prompts = random_prompts(LENGTHS, VOCAB)
    tables = scattered(len(prompts), BLOCKS)

    def chunk(index: int, which: int) -> Chunk:
        row = SampleRow(index, 0, 0, GREEDY)
        return Chunk(index, prompts[index], 0, tables[index], (row,), adapter=digests[which])

    for which in range(len(digests)):
        alone = logits(runner, [chunk(0, which)])[0]
        for others in ((0, 0, 0, 0, 0), (1, 2, 3, 0, 1), (3, 3, 3, 3, 3), (which,) * 5):
            beside = [chunk(i, other) for i, other in enumerate(others, 1)]
            assert torch.equal(logits(runner, [chunk(0, which), *beside])[0], alone)
            assert torch.equal(logits(runner, [*beside, chunk(0, which)])[-1], alone)


def test_scores_and_samples_stay_with_their_chunks(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"))
    digests = ["", *(runner.load_adapter(path).digest for path in adapters_of("llama", tmp_path))]
    prompts = random_prompts((9, 12, 5), VOCAB)
    tables = scattered(3, BLOCKS)
    chunks = [
        Chunk(i, prompt, 0, tables[i], (SampleRow(i, 0, 0, GREEDY),), adapter=digests[3 - i])
        for i, prompt in enumerate(prompts)
    ]
    chunks[1] = chunks[1]._replace(samples=())
    whole = logits(runner, chunks)
    assert torch.equal(whole, torch.cat([logits(runner, [chunk]) for chunk in chunks[::2]]))


def test_more_adapters_than_memory_has_room_for_take_turns(
    saved: SaveModel, tmp_path: Path
) -> None:
    roomy = opened(saved("llama"))
    paths = [save_adapter("llama", tmp_path / str(i), seed=i) for i in range(6)]
    digests = [roomy.load_adapter(path).digest for path in paths]
    each = roomy.load_adapter(paths[0]).num_bytes
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = answers(roomy, digests, prompts)
    assert len({tuple(text) for text in wanted}) == 6
    tight = opened(saved("llama"), adapter_memory_bytes=2 * each + 1, adapter_host_bytes=100 * each)
    assert [tight.load_adapter(path).digest for path in paths] == digests
    assert answers(tight, digests, prompts) == wanted
    assert answers(tight, digests[:2] * 3, prompts) == answers(roomy, digests[:2] * 3, prompts)


def test_adapters_are_loaded_beside_steps(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"))
    first = runner.load_adapter(save_adapter("llama", tmp_path / "first")).digest
    others = [save_adapter("llama", tmp_path / str(i), seed=i, rank=i) for i in range(2, 10)]
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = answers(runner, [first, ""] * 3, prompts)
    with ThreadPoolExecutor(4) as threads:
        loading = [threads.submit(runner.load_adapter, path) for path in others * 2]
        while not all(one.done() for one in loading):
            assert answers(runner, [first, ""] * 3, prompts) == wanted
    digests = [one.result(0).digest for one in loading]
    assert digests[:8] == digests[8:] and len(set(digests)) == 8
    assert answers(runner, [first, ""] * 3, prompts) == wanted


def test_memory_for_adapters_is_bounded(saved: SaveModel, tmp_path: Path) -> None:
    paths = [save_adapter("llama", tmp_path / str(i), seed=i) for i in range(3)]
    each = opened(saved("llama")).load_adapter(paths[0]).num_bytes
    runner = opened(saved("llama"), adapter_memory_bytes=2 * each + 8192)
    first, second = (runner.load_adapter(path).digest for path in paths[:2])
    with pytest.raises(Overloaded, match="memory for adapters is full"):
        runner.load_adapter(paths[2])
    assert runner.load_adapter(paths[0]).digest == first
    runner.unload_adapter(second)
    with pytest.raises(NotFound):
        runner.unload_adapter(second)
    assert runner.load_adapter(paths[2]).digest not in (first, second)
    with pytest.raises(Internal, match="not loaded"):
        logits(runner, [Chunk(0, [5], 0, ((0, 1),), adapter=second)])
    with pytest.raises(InvalidArgument, match="and adapters have"):
        opened(saved("llama"), adapter_memory_bytes=each - 1, adapter_host_bytes=MIB).load_adapter(
            paths[0]
        )


def test_a_worker_without_memory_for_adapters_has_none(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"), adapter_memory_bytes=0)
    with pytest.raises(InvalidArgument, match="no memory for adapters"):
        runner.load_adapter(save_adapter("llama", tmp_path))
    with pytest.raises(Internal, match="adapters"):
        logits(runner, [Chunk(0, [5], 0, ((0, 1),), adapter="0" * 32)])


def test_digests_are_of_contents(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"))
    first = runner.load_adapter(save_adapter("llama", tmp_path / "a"))
    same = runner.load_adapter(save_adapter("llama", tmp_path / "b"))
    other = runner.load_adapter(save_adapter("llama", tmp_path / "c", lora_alpha=15))
    assert replace(same, name="a") == first
    assert other.digest != first.digest
    assert (first.name, same.name, first.rank) == ("a", "b", 8)


PATTERNS: dict[str, Any] = {
    "rank_pattern": {"model.layers.1.self_attn.q_proj": 3},
    "alpha_pattern": {"model.layers.2.mlp.down_proj": 40},
}


def test_ranks_and_factors_of_single_layers(saved: SaveModel, tmp_path: Path) -> None:
    runner = opened(saved("llama"))
    path = save_adapter("llama", tmp_path, **PATTERNS)
    prompts = random_prompts(LENGTHS, VOCAB)
    wanted = expected("llama", path, prompts, NEW)
    assert answers(runner, [runner.load_adapter(path).digest] * 6, prompts) == wanted


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    stored = load_file(folder / "adapter_model.safetensors")
    change(stored)
    save_file(stored, folder / "adapter_model.safetensors")


_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
_B = _A.replace("lora_A", "lora_B")
Damage = Callable[[Path], object]


def _with(name: str, tensor: torch.Tensor) -> Damage:
    return lambda folder: _weights(folder, lambda stored: stored.update({name: tensor}))


def _without(*names: str) -> Damage:
    def change(stored: dict[str, torch.Tensor]) -> None:
        for name in names:
            del stored[name]

    return lambda folder: _weights(folder, change)


def _set(**settings: Any) -> Damage:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))

    return change


def _replaced(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def _linked_out(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _cut_short(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _a_pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


REFUSED: dict[str, tuple[Damage, str]] = {
    "DoRA": (_set(use_dora=True), "DoRA"),
    "DoRA's tensor": (
        _with(_A.replace("lora_A.weight", "lora_magnitude_vector"), torch.ones(64)),
        "magnitude",
    ),
    "trained modules": (_set(modules_to_save=["lm_head"]), "modules_to_save"),
    "a trained module's tensor": (
        _with("base_model.model.lm_head.weight", torch.ones(4, 4)),
        "lm_head",
    ),
    "trained embeddings": (
        _with("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(8, 1000)),
        "embed_tokens",
    ),
    "trained tokens": (_set(trainable_token_indices=[1]), "trainable_token_indices"),
    "biases": (_set(bias="lora_only"), "biases"),
    "its own biases": (_set(lora_bias=True), "biases"),
    "parameters": (_set(target_parameters=["experts.down_proj"]), "target_parameters"),
    "activation by tokens": (_set(alora_invocation_tokens=[5]), "alora_invocation_tokens"),
    "a setting of tomorrow": (_set(use_next_thing={"x": 1}), "use_next_thing"),
    "PiSSA": (_set(init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
    "another type": (_set(peft_type="IA3"), "IA3"),
    "a target that is not there": (_set(target_modules=[*ALL, "z_proj"]), "z_proj"),
    "a layer that is not there": (
        _with(_A.replace("layers.1", "layers.7"), torch.ones(8, 64)),
        "only one",
    ),
    "an output layer": (_set(target_modules=["lm_head"]), "lm_head"),
    "one half": (_without(_B), "only one of its two matrices"),
    "a target's layer left out": (
        _without(_A, _B),
        "lacks matrices for model.layers.1.self_attn.q_proj",
    ),
    "another rank": (_set(r=4), "rank 8 and 8, its settings say 4"),
    "a rank beyond the bound": (_set(r=100_000), "may be 1 to 512"),
    "no rank": (_set(r=0), "rank is 0"),
    "a rank that is none": (_set(r="8"), "no number"),
    "an alpha that is none": (_set(lora_alpha=float("nan")), "no number"),
    "a pattern for ever": (_set(rank_pattern={"(a+)+": 8}), "no plain name"),
    "another shape": (_with(_B, torch.ones(63, 8)), "63 x 64"),
    "three dimensions": (_with(_A, torch.ones(8, 8, 8)), "shape"),
    "whole numbers": (_with(_A, torch.ones(8, 64, dtype=torch.int32)), "int32"),
    "no numbers": (_with(_A, torch.full((8, 64), float("nan"))), "no number"),
    "a pickle": (_pickled, "safetensors"),
    "a link": (_linked_out, "outside"),
    "a pipe": (_a_pipe, "no file"),
    "half a file": (_cut_short, "corrupt"),
    "an empty file": (_replaced("adapter_model.safetensors", b""), "corrupt"),
    "a huge file": (_replaced("adapter_model.safetensors", bytes(9 * MIB)), "larger"),
    "a huge header": (_replaced("adapter_model.safetensors", b"\xff" * 64), "corrupt"),
    "settings that are none": (_replaced("adapter_config.json", b"[" * 100_000), "JSON"),
    "no settings": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "adapter_config.json",
    ),
}


@pytest.fixture(scope="module")
def llama(saved: SaveModel) -> TorchRunner:
    return opened(saved("llama"))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    kind: str, llama: TorchRunner, tmp_path: Path
) -> None:
    damage, text = REFUSED[kind]
    folder = save_adapter("llama", tmp_path / "adapter")
    damage(folder)
    with pytest.raises(InvalidArgument, match=text) as refusal:
        llama.load_adapter(folder)
    assert refusal.value.field == "adapter"
    assert str(tmp_path) not in refusal.value.message


def test_the_folder_of_nothing(llama: TorchRunner, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no such folder"):
        llama.load_adapter(tmp_path / "nothing")


def test_an_adapter_of_another_model(saved: SaveModel, llama: TorchRunner, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"the model has no transformer\.h"):
        llama.load_adapter(save_adapter("gpt2", tmp_path))
