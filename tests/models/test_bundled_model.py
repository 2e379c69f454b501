"""The bundled model is small, loads everywhere, and is right."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from model.corpus import Example, evaluation_set
from model.evaluate import greedy, judge, load, tally
from model.tokens import Encoder
from model.tools import Tool, tool_chat, written

FOLDER = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
#: Neither the training run nor the model card has seen these questions.
FRESH_SEED, SLOW_SEED = 60_221, 66_260

CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": " Say hello in Japanese. "},
    {"role": "assistant", "content": "こんにちは！"},
    {"role": "user", "content": "And in Korean?"},
]
TOOLS = [
    Tool("get_weather", {"city": "string", "unit": ("celsius", "fahrenheit")}).described(),
    {"type": "function", "function": {"name": "ring"}},
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "properties": {
                    "query": {"anyOf": [{"type": "string"}]},
                    "limit": {"type": "integer"},
                },
                "required": ["query"],
            },
        },
    },
]
CALL = {"name": "get_weather", "arguments": {"city": "\u00c5lesund <>&'", "unit": "celsius"}}
AGENT = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": CALL}] * 2,
    },
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": '{"sky": "grey"}'},
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
    _assert_right(bundled, FRESH_SEED, questions=172, per_kind=0.6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kind_of_answer_is_right(bundled: tuple[Any, Any]) -> None:
    _assert_right(bundled, SLOW_SEED, questions=4300, per_kind=0.6)


def test_a_long_story_streams_long_enough_and_ends(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    [story] = greedy(
        model, tokenizer, [([{"role": "user", "content": "Tell me a long story"}], [])]
    )
    assert story is not None
    assert story.endswith("The end.")
    assert 150 <= len(tokenizer.encode(story)) <= 300


def test_tokenizer_needs_no_transformers(bundled: tuple[Any, Any]) -> None:
    """The tokenizer pool has only `tokenizers` and jinja2: both must agree with transformers."""
    _, tokenizer = bundled
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text("utf-8"))
    for messages, tools in ((CHAT, None), (AGENT, TOOLS)):
        text = template.render(
            messages=messages,
            tools=tools,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            add_generation_prompt=True,
        )
        assert text == tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert plain.decode(ids, skip_special_tokens=False) == text


def test_the_template_shows_tools_calls_and_results(bundled: tuple[Any, Any]) -> None:
    call = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund <>&\'", '
        '"unit": "celsius"}}\n</tool_call>'
    )
    assert bundled[1].apply_chat_template(AGENT, tools=TOOLS, tokenize=False) == (
        "<|begin|><|tools|>get_weather(city:string,unit:celsius|fahrenheit)\nring()\n"
        "search(query:string)<|end|><|user|>What is the weather?<|end|>"
        f"<|assistant|>{call}\n{call}<|end|>"
        '<|tool|> sunny<|end|><|tool|> {"sky": "grey"}<|end|>'
    )


@pytest.mark.parametrize(
    ("role", "words"),
    [("developer", "unknown role: developer"), ("tool", "role tool must follow a call")],
)
def test_an_impossible_role_is_refused(bundled: tuple[Any, Any], role: str, words: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=words):
        bundled[1].apply_chat_template([{"role": role, "content": "x"}], tokenize=False)


def test_what_is_learnt_is_what_the_assistant_writes(bundled: tuple[Any, Any]) -> None:
    """Training sees the same ids as serving, and learns all that a reader of the answer gets."""
    tokenizer, rng = bundled[1], random.Random("learnt")
    encoder = Encoder(tokenizer)
    for _ in range(50):
        chat = tool_chat(rng)
        ids, learnt = encoder.tool_chat(chat)
        spoken = [written(m) for m in chat.messages[chat.given :] if m["role"] == "assistant"]
        taught = [token for token, known in zip(ids, learnt, strict=True) if known]
        assert tokenizer.decode(taught) == "".join(text + tokenizer.eos_token for text in spoken)


@pytest.mark.parametrize("text", ["Ελλάδα", "日本語", "👩‍🚀", "ไทย", "\x00\t\n", "1234567890", "𝔘"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert plain.decode(plain.encode(text).ids) == text


def test_every_special_token_is_where_the_configuration_says(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<pad>")
    assert model.config.vocab_size == len(tokenizer)
