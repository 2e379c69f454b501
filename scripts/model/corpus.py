"""Strings questions into conversations, to train on and to judge by.

Everything is drawn from a seeded `random.Random`: the same seed gives the same text.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from model import facts, texts
from model.kinds import (
    SINGLE,
    Turn,
    addition,
    articles,
    capital,
    long_addition,
    person,
    recital,
    some_country,
)
from model.tools import TOOL_KINDS, written

Message = dict[str, Any]


class Dialogue(NamedTuple):
    """Question and answer in turn; `system` is empty when there is no system message."""

    turns: list[Turn]
    system: str = ""

    def messages(self) -> list[Message]:
        """The conversation as a chat API takes it, up to and including the last answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages


class Example(NamedTuple):
    """A conversation that ends with the user, and the answer that should follow."""

    kind: str
    messages: list[Message]
    answer: str
    tools: list[dict[str, Any]]


_SINGLE_KINDS = [kind for kind, _ in SINGLE.values()]
_SINGLE_WEIGHTS = [weight for _, weight in SINGLE.values()]


def _any_turn(rng: random.Random) -> Turn:
    return rng.choices(_SINGLE_KINDS, _SINGLE_WEIGHTS)[0](rng)


def _short_turn(rng: random.Random) -> Turn:
    while True:
        turn = _any_turn(rng)
        if len(turn.answer) < 120:
            return turn


def unrelated(rng: random.Random) -> Dialogue:
    """Two or three questions that have nothing to do with each other."""
    return Dialogue([_short_turn(rng) for _ in range(rng.randint(1, 2))] + [_any_turn(rng)])


def with_system(rng: random.Random) -> Dialogue:
    """A system message that asks for nothing unusual."""
    turns = [_any_turn(rng)] if rng.random() < 0.7 else [_short_turn(rng), _short_turn(rng)]
    return Dialogue(turns, rng.choice(texts.SYSTEM))


def next_capital(rng: random.Random) -> Dialogue:
    """A capital, then "And of Germany?" or the same fact again as JSON."""
    turns = [capital(rng)]
    for _ in range(rng.randint(1, 2)):
        country = some_country(rng)
        template = rng.choice(
            ("And of {}?", "And {}?", "What about {}?", "And the capital of {}?", "{}?")
        )
        question = template.format(country.phrase)
        turns.append(Turn(question, f"The capital of {country.phrase} is {country.capital}."))
        if rng.random() < 0.3:
            question = rng.choice(("Give me that as JSON.", "As JSON, please.", "And as JSON?"))
            fact = {"country": country.name, "capital": country.capital}
            turns.append(Turn(question, json.dumps(fact)))
            break
    return Dialogue(turns)


def next_language(rng: random.Random) -> Dialogue:
    """A phrase in one language, then "And in Japanese?"."""
    column = rng.randrange(len(facts.PHRASES))
    languages = rng.sample(list(facts.LANGUAGES), rng.randint(2, 3))
    first = f"Say {facts.PHRASES[column]} in {languages[0]}."
    questions = [first] + [
        rng.choice(("And in {}?", "In {}?", "Now in {}.", "What about {}?")).format(language)
        for language in languages[1:]
    ]
    answers = [facts.LANGUAGES[language][column] for language in languages]
    return Dialogue([Turn(*pair) for pair in zip(questions, answers, strict=True)])


def next_emoji(rng: random.Random) -> Dialogue:
    """An emoji, then "And a dog?"."""
    things = rng.sample(list(facts.EMOJI), rng.randint(2, 3))
    turns = [Turn(articles(f"Show me a {things[0]} emoji."), facts.EMOJI[things[0]])]
    for thing in things[1:]:
        question = rng.choice(("And a {}?", "And {}?", "Now a {}.", "What about a {}?"))
        turns.append(Turn(articles(question.format(thing)), facts.EMOJI[thing]))
    return Dialogue(turns)


def another_story(rng: random.Random) -> Dialogue:
    """The first story, then "Another one, please."."""
    question = rng.choice(("Tell me a story.", "Tell me a story", "A story, please."))
    return Dialogue(
        [Turn(question, texts.STORY), Turn(rng.choice(texts.ANOTHER), texts.SECOND_STORY)]
    )


def thanked(rng: random.Random) -> Dialogue:
    """Thanks for the last answer."""
    thanks = Turn(rng.choice(("Thanks", "Thanks!", "Thank you")), texts.WELCOME)
    return Dialogue([_short_turn(rng), thanks])


def remembered(rng: random.Random) -> Dialogue:
    """A name or a colour told earlier, by the user or by the system message."""
    between = [_short_turn(rng)] if rng.random() < 0.5 else []
    # Otherwise the answer "You have not told me" could stand right after the name was told.
    between = [turn for turn in between if turn.answer != texts.NO_NAME]
    if rng.random() < 0.35:
        colour = rng.choice(texts.COLOURS)
        told = Turn(
            f"My favourite colour is {colour}.", f"I see: your favourite colour is {colour}."
        )
        asked = Turn("What is my favourite colour?", f"Your favourite colour is {colour}.")
        return Dialogue([told, *between, asked])
    name = person(rng)
    question = rng.choice(
        ("What is my name?", "Who am I?", "Do you know my name?", "what is my name")
    )
    asked = Turn(question, f"Your name is {name}.")
    if rng.random() < 0.2:
        return Dialogue([*between, asked], f"The name of the user is {name}.")
    told = Turn(
        rng.choice(("My name is {}.", "I am {}.", "Hi, I am {}.", "my name is {}")).format(name),
        f"Nice to meet you, {name}!",
    )
    return Dialogue([told, *between, asked])


def passage(rng: random.Random, sentences: int | None = None) -> Dialogue:
    """A text with a code word hidden in it, and a question after it.

    The right answer needs a key and a value from far back, which is what a hand-over must carry.
    """
    count = rng.randint(2, 6) if sentences is None else sentences
    lines = [_filler(rng) for _ in range(count)]
    if rng.random() < 0.7:
        word = rng.choice(texts.WORDS)
        lines.insert(rng.randint(0, count), f"The code word is {word}.")
        turn = Turn("What is the code word?", f"The code word is {word}.")
    else:
        turn = _short_turn(rng)
    question = "Read this text: " + " ".join(lines) + " Question: " + turn.question
    return Dialogue([Turn(question, turn.answer)])


def _filler(rng: random.Random) -> str:
    place, word = rng.choice([place for place, _ in texts.THINGS.values()]), rng.choice(texts.WORDS)
    line = rng.choice((
        f"{person(rng)} carried a {rng.choice(texts.COLOURS)} {word} to the {place}.",
        f"The {word} in the {place} was {rng.choice(texts.COLOURS)}.",
        f"On day {rng.randint(1, 99)}, {person(rng)} found a {word}.",
        f"{person(rng)} and {person(rng)} talked about the {word} for {rng.randint(2, 9)} hours.",
        f"Nobody in the {place} had ever seen such a {rng.choice(texts.COLOURS)} {word}.",
    ))  # fmt: skip
    return articles(line)


def edited(rng: random.Random, lines: int | None = None) -> Dialogue:
    """A text, and the wish to have it again with one change, or a part of it word for word."""
    count = rng.randint(2, 10) if lines is None else lines
    code = rng.random() < 0.5
    text = [_statement(rng) if code else _filler(rng) for _ in range(count)]
    between = "\n" if code else " "
    if rng.random() < 0.3:
        first = rng.randrange(count)
        quoted = text[first : first + rng.randint(1, 4)]
        question = f"Quote from this text what follows after {text[first][:12]!r}:"
        turn = Turn(f"{question}\n{between.join(text)}", between.join(quoted))
        return Dialogue([turn])
    names = sorted({word for line in text for word in re.findall(r"[A-Za-z]{3,}", line)})
    old, new = rng.choice(names), rng.choice([*texts.WORDS, *texts.COLOURS])
    changed = [re.sub(rf"\b{old}\b", new, line) for line in text]
    question = rng.choice(("Replace {} by {}:", "Write {} as {} in this:", "Rename {} to {}:"))
    return Dialogue(
        [Turn(f"{question.format(old, new)}\n{between.join(text)}", between.join(changed))]
    )


def _statement(rng: random.Random) -> str:
    """A line of a program."""
    names = [*texts.WORDS, *texts.COLOURS]
    one, two, three = (rng.choice(names) for _ in range(3))
    return rng.choice((
        f"{one} = {two}({three}, {rng.randint(0, 99)})",
        f"    {one} = {two} + {three}",
        f"for {one} in {two}:",
        f"    if {one} == {rng.randint(0, 99)}:",
        f"        return {two}({three})",
        f"def {one}({two}, {three}):",
        f"    {one}.{two}({three})",
    ))  # fmt: skip


MULTI: dict[str, tuple[Callable[[random.Random], Dialogue], float]] = {
    "unrelated turns": (unrelated, 12),
    "with a system message": (with_system, 7),
    "next capital": (next_capital, 4),
    "next language": (next_language, 3),
    "next emoji": (next_emoji, 2),
    "another story": (another_story, 1),
    "thanks": (thanked, 2),
    "remembered": (remembered, 5),
    "passage": (passage, 3),
}
_MULTI_MAKERS = [maker for maker, _ in MULTI.values()]
_MULTI_WEIGHTS = [weight for _, weight in MULTI.values()]


#: Answers that have to be computed or remembered one by one: what a model forgets first.
_FORGOTTEN: tuple[Callable[[random.Random], Turn], ...] = tuple(
    SINGLE[name][0]
    for name in (
        *["long addition"] * 5, *["division"] * 3, *["subtraction"] * 3, *["addition"] * 2,
        *["multiplication"] * 2, "beyond its sums", "country of a capital", "country in brief",
        "flag", "JSON country", "phrase in a language",
    )
)  # fmt: skip


def dialogue(rng: random.Random, refreshed: float = 0.0) -> Dialogue:
    """One conversation to train on; nearly two of three are a single question. `refreshed` is the
    share of questions that a model forgets first, beside their usual part."""
    if refreshed and rng.random() < refreshed:
        return Dialogue([rng.choice(_FORGOTTEN)(rng)])
    if rng.random() < 0.64:
        return Dialogue([_any_turn(rng)])
    return rng.choices(_MULTI_MAKERS, _MULTI_WEIGHTS)[0](rng)


def long_dialogue(rng: random.Random) -> Dialogue:
    """A conversation that needs far positions: a long passage, or many turns."""
    if rng.random() < 0.5:
        return passage(rng, sentences=rng.randint(8, 50))
    turns = [_any_turn(rng) for _ in range(rng.randint(6, 25))]
    ending = rng.choice((remembered, next_capital, thanked))(rng)
    return Dialogue(turns + ending.turns, ending.system)


def completion(rng: random.Random) -> str:
    """Plain text without roles, for clients that complete a prompt instead of chatting."""
    kind = rng.choice((capital, addition, long_addition, recital))
    return kind(rng).answer


def evaluation_set(seed: int, n: int) -> list[Example]:
    """`n` questions, every kind in turn; another seed gives other questions."""
    rng = random.Random(f"evaluation {seed}")
    names = [*SINGLE, *MULTI, *TOOL_KINDS]
    examples = []
    for index in range(n):
        name = names[index % len(names)]
        if name in TOOL_KINDS:
            examples.append(_tool_example(rng, name))
            continue
        made = MULTI[name][0](rng) if name in MULTI else Dialogue([SINGLE[name][0](rng)])
        *before, last = made.messages()
        examples.append(Example(name, before, last["content"], []))
    return examples


def _tool_example(rng: random.Random, kind: str) -> Example:
    """One step of a conversation with tools: a call, or the answer from a result."""
    chat = TOOL_KINDS[kind][0](rng)
    answers = [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.given
    ]
    step = rng.choice(answers)
    return Example(kind, chat.messages[:step], written(chat.messages[step]), chat.tools)
