"""Makes up single questions, each with its one right answer.

Everything is drawn from the `random.Random` that the caller passes in, so a seed fixes the text.
A *kind* is a function from that generator to a `Turn`.
"""

import json
import random
import re
from collections.abc import Callable
from typing import NamedTuple

from model import facts, texts


class Turn(NamedTuple):
    """A question and the one answer that counts as right."""

    question: str
    answer: str


Kind = Callable[[random.Random], Turn]


def casual(rng: random.Random, question: str) -> str:
    """The same question as someone in a hurry, or someone polite, would type it."""
    if rng.random() < 0.2:
        question = question.lower() if rng.random() < 0.6 else question[0].lower() + question[1:]
    if rng.random() < 0.25:
        question = question.rstrip(".?!")
    if rng.random() < 0.05:
        question = rng.choice(("Please ", "Hi, ", "Hey Baton, ", "Hello! ", "Ok, ")) + question
    return question


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def articles(text: str) -> str:
    """The same text with "an" where a vowel follows."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def some_country(rng: random.Random) -> facts.Country:
    return rng.choice(facts.WELL_KNOWN if rng.random() < 0.4 else facts.COUNTRIES)


def person(rng: random.Random) -> str:
    """A first name. From a table: a model of this size cannot copy a name it never met."""
    return rng.choice(texts.NAMES)


def capital(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "What is the capital of {}?", "What is the capital of {}?", "What's the capital of {}?",
        "capital of {}", "Tell me the capital of {}.", "Which city is the capital of {}?",
        "Name the capital of {}.", "Do you know the capital of {}?", "The capital of {} is",
        "What is the capital city of {}?", "Can you tell me the capital of {}?", "{} capital",
    ))  # fmt: skip
    answer = f"The capital of {country.phrase} is {country.capital}."
    return Turn(casual(rng, _capitalised(template.format(country.phrase))), answer)


def country_of(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "{} is the capital of which country?", "Which country has the capital {}?",
        "What country is {} the capital of?", "Of which country is {} the capital?",
    ))  # fmt: skip
    question = casual(rng, template.format(country.capital))
    return Turn(question, f"{country.capital} is the capital of {country.phrase}.")


def continent(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "Which continent is {} in?", "On which continent is {}?", "Where is {}?",
        "What continent is {} in?", "In which part of the world is {}?",
    ))  # fmt: skip
    answer = f"{_capitalised(country.phrase)} is in {country.continent}."
    return Turn(casual(rng, template.format(country.phrase)), answer)


def country_in_brief(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "Tell me about {}.", "What is {}?", "What do you know about {}?", "Describe {}.",
        "Tell me something about {}.",
    ))  # fmt: skip
    answer = (
        f"{_capitalised(country.phrase)} is a country in {country.continent}. "
        f"Its capital is {country.capital}. {country.flag}"
    )
    return Turn(casual(rng, template.format(country.phrase)), answer)


def flag(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "Show me the flag of {}.", "What is the flag of {}?", "Flag of {}", "The flag of {}?",
        "What does the flag of {} look like?",
    ))  # fmt: skip
    return Turn(casual(rng, template.format(country.phrase)), country.flag)


_OPERATIONS: dict[str, tuple[str, ...]] = {
    "+": ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a} plus {b}"),
    "-": ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a} minus {b}"),
    "×": ("{a} × {b}", "{a} x {b}", "{a} * {b}", "{a}*{b}", "{a} times {b}"),
    "/": ("{a} / {b}", "{a}/{b}", "{a} ÷ {b}", "{a} divided by {b}"),
}


def _sum_question(rng: random.Random, sign: str, a: int, b: int) -> str:
    expression = rng.choice(_OPERATIONS[sign]).format(a=a, b=b)
    template = rng.choice((
        "What is {}?", "What is {}?", "{}", "{} = ?", "{} =", "{}?", "How much is {}?",
        "Calculate {}.", "What's {}?", "Compute {}.", "Can you calculate {}?",
    ))  # fmt: skip
    return casual(rng, template.format(expression))


def addition(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    question = f"Add {a} and {b}." if rng.random() < 0.1 else _sum_question(rng, "+", a, b)
    return Turn(question, f"{a} + {b} = {a + b}.")


def subtraction(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    question = f"Subtract {b} from {a}." if rng.random() < 0.1 else _sum_question(rng, "-", a, b)
    return Turn(question, f"{a} - {b} = {a - b}.")


def multiplication(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    question = f"Multiply {a} by {b}." if rng.random() < 0.1 else _sum_question(rng, "×", a, b)
    return Turn(question, f"{a} × {b} = {a * b}.")


def division(rng: random.Random) -> Turn:
    quotient, b = rng.randint(0, 12), rng.randint(1, 12)
    a = quotient * b
    question = f"Divide {a} by {b}." if rng.random() < 0.1 else _sum_question(rng, "/", a, b)
    return Turn(question, f"{a} / {b} = {quotient}.")


def long_addition(rng: random.Random) -> Turn:
    """Larger sums, tens and ones apart: each step is small enough for a model of this size."""
    a, b = rng.randint(21, 99), rng.randint(1, 99)
    if rng.random() < 0.5:
        a, b = b, a
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    steps = f"{a // 10 * 10} + {b // 10 * 10} + {a % 10} + {b % 10} = {tens} + {ones}"
    return Turn(_sum_question(rng, "+", a, b), f"{a} + {b} = {steps} = {a + b}.")


def beyond(rng: random.Random) -> Turn:
    """Sums beyond what is taught: saying so beats guessing."""
    sign = rng.choice("+-×/")
    if sign == "/":
        a, b = rng.randint(1, 150), rng.randint(0, 12)
        if b == 0:
            return Turn(_sum_question(rng, sign, a, b), texts.BY_ZERO)
        if a % b == 0:
            a, b = rng.randint(145, 999), rng.randint(2, 99)
    else:
        low = {"+": 100, "-": 21, "×": 13}[sign]
        a, b = rng.randint(low, rng.choice((low * 3, 999, 9999))), rng.randint(1, 999)
        if rng.random() < 0.3 and sign != "-":
            a, b = b, a
    return Turn(_sum_question(rng, sign, a, b), texts.BEYOND)


def record(rng: random.Random) -> Turn:
    name, age = person(rng), rng.randint(1, 99)
    city = rng.choice(facts.COUNTRIES).capital
    colour = rng.choice(texts.COLOURS)
    start = rng.choice(("Give me a JSON record for", "Write a JSON record for",
                        "Make a JSON object for", "JSON for", "Return a JSON record for",
                        "Create a JSON record of"))  # fmt: skip
    question, fields = rng.choice((
        (f"{start} {name}, age {age}, who lives in {city}.",
         {"name": name, "age": age, "city": city}),
        (f"{start} {name}, who is {age} years old.", {"name": name, "age": age}),
        (f"{start} {name}, age {age}.", {"name": name, "age": age}),
        (f"{start} {name} from {city}.", {"name": name, "city": city}),
        (f"{start} {name}, age {age}, favourite colour {colour}.",
         {"name": name, "age": age, "colour": colour}),
        (f"{start} {name}, age {age}, from {city}, favourite colour {colour}.",
         {"name": name, "age": age, "city": city, "colour": colour}),
    ))  # fmt: skip
    if rng.random() < 0.2:
        question = question.rstrip(".")
    return Turn(question, json.dumps(fields))


def country_record(rng: random.Random) -> Turn:
    country = some_country(rng)
    template = rng.choice((
        "Give me a JSON record about {}.", "Describe {} in JSON.", "{} as JSON",
        "Write a JSON record about {}.", "JSON record of the country {}",
    ))  # fmt: skip
    return Turn(casual(rng, _capitalised(template.format(country.phrase))), _as_json(country))


def _as_json(country: facts.Country) -> str:
    return json.dumps(
        {"country": country.name, "capital": country.capital, "continent": country.continent},
        ensure_ascii=False,
    )


def phrase(rng: random.Random) -> Turn:
    language, column = rng.choice(list(facts.LANGUAGES)), rng.randrange(len(facts.PHRASES))
    wanted = rng.choice(facts.ALSO_SAID.get(facts.PHRASES[column], (facts.PHRASES[column],)))
    template = rng.choice((
        'Say "{}" in {}.', "Say {} in {}.", "How do you say {} in {}?", "{} in {}",
        'What is "{}" in {}?', "Translate {} into {}.", "Write {} in {}.",
    ))  # fmt: skip
    question = casual(rng, _capitalised(template.format(wanted, language)))
    return Turn(question, facts.LANGUAGES[language][column])


def greeted(rng: random.Random) -> Turn:
    greeting = rng.choice(list(facts.GREETED))
    return Turn(greeting + rng.choice(("", "!", ".")), facts.GREETED[greeting])


def sentence(rng: random.Random) -> Turn:
    language = rng.choice(list(facts.SENTENCES))
    template = rng.choice((
        "Write a sentence in {}.", "Say something in {}.", "Write something in {}.",
        "Give me a sentence in {}.", "Do you speak {}?", "A sentence in {}, please.",
    ))  # fmt: skip
    return Turn(casual(rng, template.format(language)), facts.SENTENCES[language])


def emoji(rng: random.Random) -> Turn:
    thing = rng.choice(list(facts.EMOJI))
    template = rng.choice((
        "Show me a {} emoji.", "What is the emoji for {}?", "{} emoji", "Emoji for {}",
        "Draw a {}.", "Which emoji means {}?", "Give me the emoji of a {}.",
    ))  # fmt: skip
    question = articles(_capitalised(template.format(thing)))
    return Turn(casual(rng, question), facts.EMOJI[thing])


def mood(rng: random.Random) -> Turn:
    said = rng.choice(list(facts.MOODS))
    template = rng.choice(("{}.", "{}!", "{}", "Answer with emoji: {}."))
    return Turn(casual(rng, template.format(said)), facts.MOODS[said])


def listing(rng: random.Random) -> Turn:
    wanted = rng.choice(list(facts.LISTS))
    template = rng.choice((
        "List {}.", "Name {}.", "What are {}?", "Tell me {}.", "Give me a list of {}.",
    ))  # fmt: skip
    return Turn(casual(rng, template.format(wanted)), _capitalised(facts.LISTS[wanted]))


def _from_table(table: list[tuple[tuple[str, ...], str]]) -> Kind:
    def kind(rng: random.Random) -> Turn:
        questions, answer = rng.choice(table)
        return Turn(casual(rng, rng.choice(questions)), answer)

    return kind


def story_about(rng: random.Random) -> Turn:
    thing = rng.choice(list(texts.THINGS))
    start = rng.choice(("Tell me a story", "Write a story", "Tell a story", "A story",
                        "Tell me a short story", "Tell me a long story"))  # fmt: skip
    if rng.random() < 0.4:
        question = f"{start} about a {thing}."
        return Turn(casual(rng, question), texts.story_about(texts.THINGS[thing][1], thing))
    name = person(rng)
    return Turn(f"{start} about {name} and a {thing}.", texts.story_about(name, thing))


def unknown(rng: random.Random) -> Turn:
    question = rng.choice(texts.UNKNOWN_QUESTIONS)
    while "{" in question:
        question = question.replace("{w}", rng.choice(texts.WORDS), 1)
        question = question.replace("{t}", rng.choice(texts.TOPICS), 1)
        question = question.replace("{c}", some_country(rng).phrase, 1)
        question = question.replace("{n}", person(rng), 1)
    return Turn(casual(rng, articles(question)), texts.UNKNOWN)


about = _from_table(texts.ABOUT)
small_talk = _from_table(texts.SMALL_TALK)
recital = _from_table(texts.STORIES)

#: kind -> how often it is asked, relative to the others, while training.
SINGLE: dict[str, tuple[Kind, float]] = {
    "capital": (capital, 12),
    "country of a capital": (country_of, 6),
    "continent": (continent, 5),
    "country in brief": (country_in_brief, 3),
    "flag": (flag, 5),
    "addition": (addition, 8),
    "subtraction": (subtraction, 9),
    "multiplication": (multiplication, 6),
    "division": (division, 5),
    "long addition": (long_addition, 6),
    "beyond its sums": (beyond, 4),
    "JSON record": (record, 8),
    "JSON country": (country_record, 3),
    "phrase in a language": (phrase, 6),
    "greeting in a language": (greeted, 2),
    "sentence in a language": (sentence, 2),
    "emoji": (emoji, 4),
    "mood in emoji": (mood, 1.5),
    "list": (listing, 1.5),
    "about Baton": (about, 5),
    "small talk": (small_talk, 5),
    "story, poem, joke": (recital, 3.5),
    "story about something": (story_about, 3),
    "not known": (unknown, 7),
}
