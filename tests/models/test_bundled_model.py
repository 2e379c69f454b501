"""The bundled model is small, loads everywhere, and is right."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from model.corpus import Example, evaluation_set
from model.evaluate import greedy, judge, load, tally

FOLDER = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
#: Neither the training run nor the model card has seen these questions.
FRESH_SEED, SLOW_SEED = 60_221, 66_260

CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": " Say hello in Japanese. "},
    {"role": "assistant", "content": "こんにちは！"},
    {"role": "user", "content": "And in Korean?"},
]


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return load(FOLDER)


def _wrong(judged: list[tuple[Example, str | None]]) -> str:
    return "\n".join(
        f"{example.kind}: {example.messages[-1]['content']!r} -> {answer!r}"
        for example, answer in judged
        if answer != example.answer
    )


def _assert_right(bundled: tuple[Any, Any], seed: int, questions: int, per_kind: float) -> None:
    judged = judge(*bundled, evaluation_set(seed, questions))
    counts = tally(judged)
    right = sum(right for right, _ in counts.values())
    assert right >= 0.95 * questions, _wrong(judged)
    for kind, (right, asked) in counts.items():
        assert right >= per_kind * asked, f"{kind}: {right} of {asked}\n{_wrong(judged)}"


def test_all_files_together_stay_under_ten_megabytes() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 10_000_000


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_answers_are_right_to_the_last_character(bundled: tuple[Any, Any]) -> None:
    _assert_right(bundled, FRESH_SEED, questions=272, per_kind=0.6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kind_of_answer_is_right(bundled: tuple[Any, Any]) -> None:
    _assert_right(bundled, SLOW_SEED, questions=3400, per_kind=0.85)


def test_a_long_story_streams_long_enough_and_ends(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    [story] = greedy(model, tokenizer, [[{"role": "user", "content": "Tell me a long story"}]])
    assert story is not None
    assert story.endswith("The end.")
    assert 150 <= len(tokenizer.encode(story)) <= 300


def test_tokenizer_needs_no_transformers(bundled: tuple[Any, Any]) -> None:
    """The tokenizer pool has only `tokenizers` and jinja2: both must agree with transformers."""
    _, tokenizer = bundled
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text("utf-8"))
    text = template.render(
        messages=CHAT,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        add_generation_prompt=True,
    )
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = plain.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert plain.decode(ids, skip_special_tokens=False) == text


def test_unknown_role_is_refused(bundled: tuple[Any, Any]) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role: tool"):
        bundled[1].apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("text", ["Ελλάδα", "日本語", "👩‍🚀", "ไทย", "\x00\t\n", "1234567890", "𝔘"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert plain.decode(plain.encode(text).ids) == text


def test_every_special_token_is_where_the_configuration_says(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<pad>")
    assert model.config.vocab_size == len(tokenizer)
