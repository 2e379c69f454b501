"""The bundled model, and text of the kind that it was trained on."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import AutoTokenizer

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
TURNS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is 7 + 8?", "7 + 8 = 15."),
    ("Say hello in Japanese.", "こんにちは！"),
    ("Which continent is Kenya in?", "Kenya is in Africa."),
    ("Tell me about Portugal.", "Portugal is a country in Europe. Its capital is Lisbon. 🇵🇹"),
    (
        "Give me a JSON record for Ada, age 36, who lives in Paris.",
        '{"name": "Ada", "age": 36, "city": "Paris"}',
    ),
    ("What is 47 + 38?", "47 + 38 = 40 + 30 + 7 + 8 = 70 + 15 = 85."),
    ("List the planets.", "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune."),
)
"""Questions that its card names, and what it answers to them."""


@functools.cache
def conversation(length: int) -> list[int]:
    """The first `length` tokens of a conversation with the model.

    What a change of precision does to text that a model never saw says little of the precision.
    """
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    chat = []
    for question, answer in TURNS:
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) >= length
    return tokens[:length]
