"""Vectors and scores equal those of transformers, whatever is computed beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batonlm.core.errors import BatonError, ContextLengthExceeded, InvalidArgument
from batonlm.core.request.request import TextPair, VectorInput
from batonlm.encode.model import EVENNESS, EncoderModel, Sequences, batches
from batonlm.engine.checkpoint import UnsupportedModel
from tests.encode.models import EMBED, QUERY, SCORE, TEXTS, saved

CLOSE = 2e-5
"""Float32 sums in another order."""
FEW = {"bert-cls", "qwen3-last", "bert-cross"}


def some(names: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FEW else [pytest.mark.deep]) for name in names]


def loaded(folder: Path) -> EncoderModel:
    return EncoderModel(folder, "", dtype="auto", device="cpu", progress=lambda done, total: None)


def tokens(model: EncoderModel, *inputs: VectorInput, cut: int | None = None) -> list[Sequences]:
    found = model.tokenize(inputs, cut)
    assert all(isinstance(each, Sequences) for each in found), found
    return [each for each in found if isinstance(each, Sequences)]


def computed(model: EncoderModel, inputs: list[Sequences], together: int) -> torch.Tensor:
    """[inputs, size], in batches of so many tokens."""
    found = torch.full((len(inputs), model.size), float("nan"))
    for indexes, numbers in model.compute(inputs, together):
        found[indexes] = numbers
    return found


def by_transformers(folder: Path, text: str) -> torch.Tensor:
    """One text alone, by the formulas of the ways to pool."""
    network = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    longest = min(tokenizer.model_max_length, network.config.max_position_embeddings)
    given = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)
    with torch.inference_mode():
        states = network(**given).last_hidden_state[0]
    flags: dict[str, Any] = {"pooling_mode_mean_tokens": True}
    if (folder / "1_Pooling/config.json").is_file():
        flags = json.loads((folder / "1_Pooling/config.json").read_text())
    ranks = torch.arange(1.0, len(states) + 1)[:, None]
    ways = {
        "cls_token": states[0],
        "max_tokens": states.max(dim=0).values,
        "mean_tokens": states.mean(dim=0),
        "weightedmean_tokens": (states * ranks).sum(dim=0) / ranks.sum(),
        "lasttoken": states[-1],
    }
    return torch.cat([each for way, each in ways.items() if flags.get(f"pooling_mode_{way}")])


@pytest.mark.parametrize("name", some(EMBED))
def test_vectors_equal_transformers_and_do_not_depend_on_their_batch(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / name)
    model = loaded(folder)
    # The longest that all of them take; `bert-cls` is configured to be shorter than its network.
    inputs = tokens(model, *TEXTS, cut=30)
    alone = computed(model, inputs, 1)
    torch.testing.assert_close(computed(model, inputs, 10_000), alone, rtol=0, atol=CLOSE)
    if name == "bert-dense":
        return  # Its layer is compared with that of its own library (tests/clients).
    texts = [str(model._tokenizer.decode([*each.ids[1:-1]])) for each in inputs]
    expected = torch.stack([by_transformers(folder, text) for text in texts])
    if (folder / "2_Normalize").is_dir():
        expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(alone, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", some(SCORE))
def test_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / name)
    model = loaded(folder)
    made: Any = transformers.AutoModelForSequenceClassification
    network = made.from_pretrained(folder, pad_token_id=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        given = tokenizer(QUERY, text, return_tensors="pt", truncation=True)
        with torch.inference_mode():
            expected.append(torch.sigmoid(network(**given).logits[0]))
    pairs = tokens(model, *(TextPair(QUERY, text) for text in TEXTS), cut=-1)
    for together in (1, 10_000):
        found = computed(model, pairs, together)
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> EncoderModel:
    return loaded(saved("bert-cls", tmp_path_factory.mktemp("encode") / "bert-cls"))


def test_what_is_too_long_is_an_error_or_cut(bert: EncoderModel) -> None:
    (error,) = bert.tokenize(["x " * 90], None)
    assert isinstance(error, ContextLengthExceeded)
    assert error.message == "has 182 tokens, and may have 32"
    (whole,) = tokens(bert, "x " * 90, cut=-1)
    assert len(whole.ids) == bert.max_tokens == 32
    assert whole.ids[-1] == 2, "the special tokens stay"
    (short,) = tokens(bert, "x " * 90, cut=8)
    assert len(short.ids) == 8
    (ids,) = tokens(bert, tuple(range(3, 60)), cut=8)
    assert ids.ids == tuple(range(3, 11))


def test_ids_are_checked(bert: EncoderModel) -> None:
    for ids in ((), (5, 10**6), (5, -1)):
        (error,) = bert.tokenize([ids], None)
        assert isinstance(error, InvalidArgument), ids


def test_prompts_are_the_models_own(bert: EncoderModel) -> None:
    assert bert.prompt("") == ""
    assert bert.prompt("query") == bert.prompt_for("query") == "search: "
    with pytest.raises(BatonError, match="document, query"):
        bert.prompt("passage")


def test_shorter_vectors_have_length_1_again(bert: EncoderModel) -> None:
    vectors = computed(bert, tokens(bert, *TEXTS, cut=-1), 10_000)
    short = bert.shortened(vectors, 5)
    torch.testing.assert_close(short.norm(dim=1), torch.ones(len(TEXTS)))
    torch.testing.assert_close(short, torch.nn.functional.normalize(vectors[:, :5], dim=1))


def test_batches_have_every_input_once_and_little_padding() -> None:
    draw = random.Random(3)
    for _ in range(200):
        lengths = [draw.choice((1, 5, 30, 31, 200, 512)) for _ in range(draw.randrange(1, 60))]
        most = draw.choice((1, 64, 512, 4096))
        found = list(batches(lengths, most))
        assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
        for batch in found:
            longest, shortest = (pick(lengths[i] for i in batch) for pick in (max, min))
            assert len(batch) == 1 or len(batch) * longest <= most
            assert longest <= 16 or shortest >= EVENNESS * longest


def changed(folder: Path, file: str, **fields: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("file", "fields", "why"),
    [
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves prompts out"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": False}, "way to pool"),
        ("config.json", {"model_type": "unheard"}, "unheard"),
        ("config.json", {"num_hidden_layers": 3}, "lacks"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(
    tmp_path: Path, file: str, fields: dict[str, Any], why: str
) -> None:
    folder = saved("bert-cls", tmp_path / "model")
    changed(folder, file, **fields)
    with pytest.raises(UnsupportedModel, match=why):
        loaded(folder)


def test_modules_are_known_and_within_the_folder(tmp_path: Path) -> None:
    folder = saved("bert-cls", tmp_path / "model")
    listed = json.loads((folder / "modules.json").read_text())
    for fields, why in (
        ({"type": "sentence_transformers.models.LSTM"}, "LSTM"),
        ({"path": "../elsewhere"}, "outside"),
    ):
        (folder / "modules.json").write_text(json.dumps([*listed[:2], listed[2] | fields]))
        with pytest.raises(UnsupportedModel, match=why):
            loaded(folder)


def test_a_classifier_of_several_labels_ranks_nothing(tmp_path: Path) -> None:
    folder = saved("bert-cross", tmp_path / "model")
    changed(folder, "config.json", id2label={"0": "no", "1": "yes"})
    with pytest.raises(UnsupportedModel, match="2 labels"):
        loaded(folder)
