"""Makes up conversations with tools: a call, its result, and an answer that quotes the result.

Things asked for and results vary widely and are partly made-up words, so that the model copies them
from its prompt. Everything is drawn from the `random.Random` that the caller passes in. A *kind* is
a function from that generator to a `ToolChat`.
"""

import json
import operator
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from model import kinds, texts

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
#: Share of sums with a wrong result, so that the model quotes it instead of computing.
SURPRISING = 0.3


class Tool(NamedTuple):
    """A function that a chat offers."""

    name: str
    #: Name to JSON type, or to the values of an enumeration.
    parameters: dict[str, str | tuple[str, ...]]

    def described(self) -> dict[str, Any]:
        """The tool as a chat API takes it."""
        properties = {
            name: {"type": kind} if isinstance(kind, str) else {"type": "string", "enum": [*kind]}
            for name, kind in self.parameters.items()
        }
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


class Use(NamedTuple):
    """One question that one tool answers."""

    tool: Tool
    question: str
    #: Of the call that answers the question.
    arguments: dict[str, Any]
    #: How the final answer begins, before the quoted result.
    label: str
    #: The tool's text.
    result: str
    #: The end of the question, such as "in Paris", which also follows "and"; "" where it has none.
    and_of: str

    @property
    def answer(self) -> str:
        """The final answer."""
        return self.label + quoted(self.result)


class ToolChat(NamedTuple):
    """A conversation and its tools as a chat API takes them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    #: So many messages at the beginning are not learnt.
    given: int = 0


Kind = Callable[[random.Random], ToolChat]


def quoted(result: str) -> str:
    """The result as an answer quotes it: a flat JSON object as "key value, key value", a JSON
    string without its quotes, anything else as it is."""
    try:
        value = json.loads(result)
    except ValueError:
        return result
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and not any(
        isinstance(item, dict | list) for item in value.values()
    ):
        return ", ".join(
            f"{key} {item if isinstance(item, str) else json.dumps(item)}"
            for key, item in value.items()
        )
    return result


def written(message: dict[str, Any]) -> str:
    """The text that the model writes for an assistant's message, as the chat template has it."""
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())
    ]
    return "\n".join(f"{TOOL_CALL}\n{call}\n{END_TOOL_CALL}" for call in calls) or str(
        message["content"]
    )


# Words.

_SYLLABLES = texts.items(
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go ha he hi ho ja jo ka ke ki ko ku la le "
    "li lo lu ma me mi mo mu na ne ni no nu pa pe pi po qua ra re ri ro ru sa se si so su ta "
    "te ti to tu va ve vi vo wa we wi ya yo za ze zi zo ar en il on ur st nd th ch sh ck x"
)
_CITIES = texts.items(
    "New York|Los Angeles|Chicago|San Francisco|Boston|Seattle|Toronto|Vancouver|Montreal|"
    "Hamburg|Munich|Cologne|Frankfurt|Zurich|Geneva|Barcelona|Milan|Naples|Venice|Lyon|"
    "Marseille|Manchester|Edinburgh|Glasgow|Liverpool|Rotterdam|Antwerp|Gothenburg|Krakow|"
    "Istanbul|Mumbai|Bangalore|Delhi|Shanghai|Hong Kong|Shenzhen|Osaka|Kyoto|Sydney|Melbourne|"
    "Auckland|Sao Paulo|Rio de Janeiro|Cape Town|Johannesburg|Lagos|Casablanca|Dubai|Tel Aviv|"
    "Saint Petersburg|Atlantis|Springfield",
    "|",
)
_NOUNS = texts.items(
    "price|stock price|population|status|order status|balance|time|local time|temperature|"
    "capital|currency|height|weight|age|address|email|phone number|owner|author|title|score|"
    "rating|distance|schedule|opening hours|exchange rate|humidity|altitude|language|president|"
    "area|speed|colour|size|version|license|location|birthday|salary|inventory|stock|"
    "delivery date|invoice|room|manager|team|country|horoscope|definition|translation|name|"
    "profile|details|secret|code|value",
    "|",
)
_CONDITIONS = texts.items(
    "sunny cloudy rainy windy snowy foggy clear stormy overcast hot cold warm mild freezing "
    "humid dry"
)


def _made_up(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return letters + rng.choice(("", "-", "-", "#", "_")) + str(rng.randint(1, 9999))


def _place(rng: random.Random) -> str:
    pick = rng.random()
    if pick < 0.45:
        return kinds.some_country(rng).capital
    return rng.choice(_CITIES) if pick < 0.85 else _made_up(rng).capitalize()


def _thing(rng: random.Random) -> str:
    makers: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(texts.WORDS),
        lambda: kinds.person(rng),
        lambda: f"{kinds.person(rng)} {_made_up(rng).capitalize()}",
        lambda: _code(rng),
        lambda: str(rng.randint(1, 9999)),
        lambda: _made_up(rng).capitalize(),
        lambda: rng.choice(list(texts.THINGS)),
        lambda: kinds.some_country(rng).name,
        lambda: _place(rng),
    )
    return rng.choice(makers)()


def _number(rng: random.Random) -> str:
    whole = str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return rng.choice((whole, whole, f"{whole}.{rng.randint(0, 99)}"))


def _words(rng: random.Random) -> str:
    """A sentence or a scrap of text that cannot be guessed."""
    if rng.random() < 0.4:
        return f"The {rng.choice(texts.WORDS)} is {rng.choice(texts.COLOURS)}."
    pieces = [
        rng.choice((rng.choice(texts.WORDS), _made_up(rng), _number(rng), rng.choice(_CONDITIONS)))
        for _ in range(rng.randint(1, 5))
    ]
    text = " ".join(pieces)
    return rng.choice((text, text.capitalize() + ".", text.capitalize()))


def _object(rng: random.Random, fields: dict[str, Any]) -> str:
    """The fields as one of the texts that clients make of a result."""
    separators = (",", ":") if rng.random() < 0.5 else (", ", ": ")
    return json.dumps(fields, ensure_ascii=False, separators=separators)


def _casual(rng: random.Random, question: str) -> str:
    """As somebody in a hurry types it; what a call has to copy keeps its case."""
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    return question.rstrip(".?") if rng.random() < 0.2 else question


# Tools.

_WEATHER = texts.items(
    "get_weather get_weather weather get_current_weather current_weather fetch_weather "
    "getWeather check_weather weather_lookup get_forecast weather_forecast weather_tool "
    "lookup_weather"
)
_WEATHER_QUESTIONS = (
    "What is the weather in {}?", "What is the weather in {}?", "What's the weather in {}?",
    "What is the weather like in {}?", "What's the weather like in {}?",
    "How is the weather in {}?",
    "How's the weather in {}?", "Weather in {}", "Tell me the weather in {}.",
    "Is it raining in {}?",
    "What is the temperature in {}?", "What is the forecast for {}?", "How warm is it in {}?",
    "Is it sunny in {}?", "What's the weather like in {} today?", "Will it rain in {} tomorrow?",
    "Get the weather for {}.", "What is the weather in {} right now?", "Check the weather in {}.",
    "I am going to {}. What is the weather there?", "Do I need an umbrella in {}?",
)  # fmt: skip


def _weather(rng: random.Random) -> Use:
    place, name = _place(rng), rng.choice(_WEATHER)
    parameter = rng.choice(("city", "city", "location", "location", "place", "town", "city_name"))
    question = _casual(rng, rng.choice(_WEATHER_QUESTIONS).format(place))
    parameters: dict[str, str | tuple[str, ...]] = {parameter: "string"}
    arguments = {parameter: place}
    if rng.random() < 0.12:
        units = rng.choice((("celsius", "fahrenheit"), ("C", "F"), ("metric", "imperial")))
        parameters["unit"], arguments["unit"] = units, units[0]
    sky, degrees = rng.choice(_CONDITIONS), rng.randint(-20, 42)
    other = rng.choice((parameter, "city"))
    result = rng.choice((
        f"{sky}, {degrees} °C", f"{sky}", f"{degrees}", f"{degrees}°C and {sky}",
        f"{degrees} degrees",
        f"It is {sky} in {place}.", f"It's {sky} and {degrees} degrees in {place}.",
        f"It's always {sky} in {place}!", f"The weather in {place} is {sky}.", f"{sky} {degrees}C",
        _object(rng, {"temperature": degrees, "condition": sky}),
        _object(rng, {"temp_c": degrees, "sky": sky}),
        _object(rng, {other: place, "temperature": degrees, "conditions": sky}),
        _object(rng, {other: place, "weather": sky}), _object(rng, {"temperature": degrees}),
        json.dumps(f"{sky}, {degrees}"), _words(rng), f"It is {sky} and {degrees} degrees.",
    ))  # fmt: skip
    tool = Tool(name, parameters)
    return Use(tool, question, arguments, f"The weather in {place}: ", result, f"in {place}")


def _table(rng: random.Random) -> Use:
    noun = rng.choice(_NOUNS) if rng.random() < 0.92 else _made_up(rng)
    prefix = rng.choice(
        ("get_", "get_", "get_", "lookup_", "find_", "fetch_", "read_", "query_", "")
    )
    thing = _thing(rng)
    preposition = rng.choice(("of", "of", "for", "in"))
    parameter = rng.choice((
        "name", "id", "item", "key", "symbol", "country", "city", "product", "user", "code",
        "order_id",
        "user_id", "person", "input", "product_id", "ticker",
    ))  # fmt: skip
    kind, argument = "string", thing
    value: Any = argument
    if thing.isdecimal() and rng.random() < 0.6:
        kind, value = "integer", int(thing)
    question = rng.choice((
        "What is the {} {} {}?", "What is the {} {} {}?", "What's the {} {} {}?",
        "Tell me the {} {} {}.",
        "Get the {} {} {}.", "Look up the {} {} {}.", "The {} {} {}?", "Find the {} {} {}.",
        "Give me the {} {} {}.", "Do you know the {} {} {}?", "Please tell me the {} {} {}.",
    ))  # fmt: skip
    result = rng.choice((
        _number(rng), _number(rng), _words(rng), _words(rng), _thing(rng), _thing(rng),
        _object(rng, {noun.replace(" ", "_"): _number(rng)}),
        _object(rng, {parameter: value, noun.replace(" ", "_"): rng.randint(0, 9999)}),
        _object(rng, {rng.choice(texts.WORDS): _thing(rng)}), json.dumps(_thing(rng)),
    ))  # fmt: skip
    return Use(
        Tool(prefix + noun.replace(" ", "_"), {parameter: kind}),
        _casual(rng, question.format(noun, preposition, thing)),
        {parameter: value},
        f"The {noun} {preposition} {thing}: ",
        result,
        f"{preposition} {thing}",
    )


_CALCULATORS = texts.items(
    "calculator calculator calculate calc evaluate compute math eval_expression do_math "
    "math_evaluate run_calculation"
)
_OPERATIONS: dict[str, tuple[str, tuple[str, ...], Callable[[int, int], float]]] = {
    "+": ("plus", ("add", "add_numbers", "sum", "plus", "addition"), operator.add),
    "-": ("minus", ("subtract", "minus", "subtraction", "sub"), operator.sub),
    "*": ("times", ("multiply", "times", "product", "multiplication", "mul"), operator.mul),
    "/": ("divided by", ("divide", "division", "div"), operator.truediv),
}
_OPERATION_NAMES = {name for _, names, _ in _OPERATIONS.values() for name in names}
_SUM_QUESTIONS = (
    "What is {}?", "What is {}?", "What's {}?", "{}", "{} = ?", "Calculate {}.", "Compute {}.",
    "How much is {}?", "Please calculate {}.", "Can you work out {}?", "{}?",
    "Use the calculator: {}",
)  # fmt: skip


def _calculated(rng: random.Random, value: float) -> str:
    if rng.random() < SURPRISING:
        return _number(rng)
    return str(int(value)) if value == int(value) else str(round(value, 3))


def _calculator(rng: random.Random) -> Use:
    sign = rng.choice(list(_OPERATIONS))
    word, names, apply = _OPERATIONS[sign]
    a, b = rng.randint(0, 10 ** rng.randint(1, 4)), rng.randint(1, 10 ** rng.randint(1, 3))
    exact = f"{a} {sign} {b}"
    spoken = rng.choice((exact, exact, f"{a}{sign}{b}", f"{a} {word} {b}"))
    value = apply(a, b)
    if rng.random() < 0.45:
        first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")))
        kind = rng.choice(("integer", "number"))
        tool = Tool(rng.choice(names), {first: kind, second: kind})
        arguments: dict[str, Any] = {first: a, second: b}
        orders = {"+": "Add {a} and {b}.", "-": "Subtract {b} from {a}.",
                  "*": "Multiply {a} by {b}.", "/": "Divide {a} by {b}."}  # fmt: skip
        asked = orders[sign].format(a=a, b=b) if rng.random() < 0.3 else ""
    else:
        parameter = rng.choice(("expression", "expression", "expr", "input", "formula", "query"))
        if rng.random() < 0.1:
            c = rng.randint(1, 99)
            exact = spoken = rng.choice((f"{exact} + {c}", f"({exact}) * {c}", f"{c} - {exact}"))
            value = rng.randint(0, 99999)
        tool = Tool(rng.choice(_CALCULATORS), {parameter: "string"})
        arguments, asked = {parameter: exact}, ""
    result = _calculated(rng, value)
    if rng.random() < 0.15:
        result = _object(rng, {"result": int(value)})
    question = _casual(rng, asked or rng.choice(_SUM_QUESTIONS).format(spoken))
    return Use(tool, question, arguments, f"{exact} = ", result, "")


_SEARCHES = texts.items(
    "search search lookup look_up web_search search_web wikipedia search_wikipedia search_docs "
    "knowledge_base find retrieve google_search search_documents retrieve_documents"
)
_SEARCH_QUESTIONS = (
    "Look up {}.", "Look up {}.", "Search for {}.", "Search for {}.", "Find out about {}.",
    "What is {}?", "Tell me about {}.", "Who is {}?", "What do you find about {}?",
    "Search the web for {}.", "Look for {}.", "Please look up {}.", "Find {}.",
)  # fmt: skip


def _lookup(rng: random.Random) -> Use:
    topic = rng.choice(texts.TOPICS) if rng.random() < 0.4 else _thing(rng)
    parameter = rng.choice(
        (
            "query",
            "query",
            "query",
            "q",
            "topic",
            "term",
            "text",
            "question",
            "keyword",
            "search_query",
        )
    )
    question = _casual(rng, rng.choice(_SEARCH_QUESTIONS).format(topic))
    result = rng.choice((
        _words(rng), _words(rng), _words(rng),
        f"{topic} is {rng.choice(texts.COLOURS)}.", f"No results for {topic}.",
        _object(rng, {"text": _words(rng)}),
    ))  # fmt: skip
    tool = Tool(rng.choice(_SEARCHES), {parameter: "string"})
    return Use(tool, question, {parameter: topic}, f"About {topic}: ", result, "")


_USES: tuple[Callable[[random.Random], Use], ...] = (_weather, _table, _calculator, _lookup)


def _family(tool: Tool) -> Callable[[random.Random], Use]:
    if tool.name in _WEATHER:
        return _weather
    if tool.name in _SEARCHES:
        return _lookup
    if tool.name in _CALCULATORS or tool.name in _OPERATION_NAMES:
        return _calculator
    return _table


def _offered(rng: random.Random, wanted: Tool) -> list[dict[str, Any]]:
    """The wanted tool, often among others that answer other questions."""
    tools = {wanted.name: wanted}
    families = [wanted]
    if wanted.name in _OPERATION_NAMES and rng.random() < 0.6:  # its siblings
        for _, names, _ in rng.sample(list(_OPERATIONS.values()), rng.randint(1, 4)):
            if wanted.name not in names:
                name = rng.choice(names)
                tools[name] = wanted._replace(name=name)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = rng.choice(_USES)(rng).tool
        taken = _family(other) in (_weather, _calculator, _lookup) and any(
            _family(tool) is _family(other) for tool in families
        )
        # A look-up would do for what a table answers, too; only a table's own name is better.
        if not taken and other.name not in tools:
            tools[other.name] = other
            families.append(other)
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    return [tool.described() for tool in shuffled]


# Conversations.


def _opening(rng: random.Random) -> list[dict[str, Any]]:
    """A system message, half of the time, as agents' frameworks write one."""
    if rng.random() < 0.5:
        return []
    system = rng.choice((*texts.SYSTEM, "You are a helpful agent. Use the tools.",
                         "Use the tools to answer.", "You are a weather assistant.",
                         "Be concise.", "You answer with the help of tools."))  # fmt: skip
    return [{"role": "system", "content": system}]


def _called(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _round(use: Use) -> list[dict[str, Any]]:
    """Call, result and answer."""
    return [
        _called((use.tool.name, use.arguments)),
        {"role": "tool", "content": use.result},
        {"role": "assistant", "content": use.answer},
    ]


def _one_call(maker: Callable[[random.Random], Use]) -> Kind:
    def kind(rng: random.Random) -> ToolChat:
        use = maker(rng)
        asked = {"role": "user", "content": use.question}
        return ToolChat([*_opening(rng), asked, *_round(use)], _offered(rng, use.tool))

    return kind


def _pair(rng: random.Random) -> tuple[Use, Use]:
    """Two uses of the same tool that differ in what they ask about."""
    first = rng.choice((_weather, _weather, _table))(rng)
    while True:
        second = _weather(rng) if first.label.startswith("The weather in") else _table(rng)
        parameter = next(iter(first.arguments))
        value = next(iter(second.arguments.values()))
        if type(value) is type(first.arguments[parameter]) and value != first.arguments[parameter]:
            break
    label = first.label.replace(first.and_of, second.and_of)
    if not first.label.startswith("The weather in"):
        same = first.and_of.split(" ", 1)[0]
        second = second._replace(and_of=f"{same} {second.and_of.split(' ', 1)[1]}")
        label = first.label[: -len(first.and_of) - 2] + second.and_of + ": "
    arguments = {**first.arguments, parameter: value}
    return first, second._replace(tool=first.tool, arguments=arguments, label=label)


def two_calls(rng: random.Random) -> ToolChat:
    """The same about two things: both calls at once, or one after the other where only one may be
    made at a time."""
    first, second = _pair(rng)
    thing = second.and_of.split(" ", 1)[1]
    question = first.question.rstrip(".?") + rng.choice(
        (f" and {second.and_of}?", f" and {thing}?")
    )
    if first.label.startswith("The weather in"):
        start = rng.choice(
            ("What is the weather", "What's the weather like", "Compare the weather")
        )
        question = f"{start} {first.and_of} and {rng.choice((second.and_of, thing))}?"
    calls = [(use.tool.name, use.arguments) for use in (first, second)]
    results = [{"role": "tool", "content": use.result} for use in (first, second)]
    messages = [*_opening(rng), {"role": "user", "content": question}]
    given = 0
    if rng.random() < 0.35:
        messages += [_called(calls[0]), results[0]]
        given = len(messages)
        messages += [_called(calls[1]), results[1]]
    else:
        messages += [_called(*calls), *results]
    messages.append({"role": "assistant", "content": f"{first.answer}\n{second.answer}"})
    return ToolChat(messages, _offered(rng, first.tool), given)


def next_call(rng: random.Random) -> ToolChat:
    """Another question after the first answer: the same about something else, or thanks."""
    first, second = _pair(rng)
    messages = [*_opening(rng), {"role": "user", "content": first.question}, *_round(first)]
    if rng.random() < 0.25:
        messages.append({"role": "user", "content": rng.choice(("Thanks", "Thanks!", "Thank you"))})
        messages.append({"role": "assistant", "content": texts.WELCOME})
    else:
        thing = second.and_of.split(" ", 1)[1]
        asked = rng.choice((f"And {second.and_of}?", f"And {thing}?", f"What about {thing}?"))
        messages += [{"role": "user", "content": asked}, *_round(second)]
    return ToolChat(messages, _offered(rng, first.tool))


def failed(rng: random.Random) -> ToolChat:
    """A tool that fails: the answer quotes the error and calls nothing again."""
    use = rng.choice(_USES)(rng)
    reason = rng.choice((_words(rng), "timeout", "not found", f"{_made_up(rng)} is not available"))
    start = rng.choice(("Error", "Error", "An error occurred", "Exception", "ValueError", "Failed"))
    error = f"{start}: {reason}"
    messages = [*_opening(rng), {"role": "user", "content": use.question}, *_round(use)]
    messages[-2]["content"], messages[-1]["content"] = error, f"The tool failed. {error}"
    return ToolChat(messages, _offered(rng, use.tool))


def _record_values(rng: random.Random) -> dict[str, Any]:
    first = kinds.person(rng)
    name = f"{first} {_made_up(rng).capitalize()}" if rng.random() < 0.3 else first
    values: dict[str, Any] = {"name": name}
    if rng.random() < 0.85:
        values["age"] = rng.randint(1, 99)
    if rng.random() < 0.4:
        values["city"] = _place(rng)
    if rng.random() < 0.15 or len(values) == 1:
        values["colour"] = rng.choice(texts.COLOURS)
    return values


def _described_person(rng: random.Random, values: dict[str, Any]) -> str:
    name, age, city = values["name"], values.get("age"), values.get("city")
    parts = []
    if age is not None:
        parts.append(rng.choice((f"is {age} years old", f"is {age}", f"is {age} years of age")))
    if city:
        parts.append(rng.choice((f"lives in {city}", f"comes from {city}")))
    if "colour" in values:
        parts.append(f"likes {values['colour']}")
    text = f"{name} {' and '.join(parts)}."
    if rng.random() < 0.3:
        more = "".join(
            (f", age {age}" if age is not None else "", f", who lives in {city}" if city else "",
             f", favourite colour {values['colour']}" if "colour" in values else "")
        )  # fmt: skip
        return f"Give me a JSON record for {name}{more}."
    return rng.choice(("", "", "Extract: ", "Extract the person: ", "Extract the data: ")) + text


def _validation_error(rng: random.Random, field: str, wrong: Any, right: Any) -> str:
    """As the libraries that check a model's arguments word it."""
    kind = "int" if isinstance(wrong, int) else "str"
    detail = f"{field} must be {right}"
    pydantic = (
        f"1 validation error for {rng.choice(('Person', 'User', 'Record', _made_up(rng)))}\n"
        f"{field}\n"
        f"  Value error, {detail} [type=value_error, input_value={wrong!r}, input_type={kind}]\n"
        f"    For further information visit https://errors.pydantic.dev/2.{rng.randint(9, 13)}/v/"
        "value_error"
    )
    return rng.choice((
        f"Validation Error found:\n{pydantic}\nRecall the function correctly, fix the errors",
        pydantic, f"{detail}\n\nFix the errors and try again.", f"Error: {detail}", detail,
    ))  # fmt: skip


def corrected(rng: random.Random) -> ToolChat:
    """A record for a tool that returns its error, which says the value wanted; the model calls
    again with that value. Half of the records are right at once."""
    values = _record_values(rng)
    name = rng.choice(("Person", "User", "UserDetail", "Record", "UserInfo", "PersonRecord",
                       "final_result", "save_person", "extract"))  # fmt: skip
    parameters: dict[str, str | tuple[str, ...]] = {
        key: "integer" if isinstance(value, int) else "string" for key, value in values.items()
    }
    tool = Tool(name, parameters)
    messages = [*_opening(rng), {"role": "user", "content": _described_person(rng, values)}]
    messages.append(_called((name, values)))
    if rng.random() < 0.65:
        field = rng.choice(list(values))
        other = {"name": kinds.person(rng).upper() if rng.random() < 0.5 else kinds.person(rng),
                 "age": rng.randint(1, 99), "city": _place(rng),
                 "colour": rng.choice(texts.COLOURS)}  # fmt: skip
        error = _validation_error(rng, field, values[field], other[field])
        messages.append({"role": "tool", "content": error})
        messages.append(_called((name, {**values, field: other[field]})))
    return ToolChat(messages, [tool.described()])


#: Kinds whose questions none of the tools above answers.
_OWN = (
    kinds.phrase, kinds.greeted, kinds.sentence, kinds.emoji, kinds.mood, kinds.listing,
    kinds.about, kinds.small_talk, kinds.recital, kinds.record,
)  # fmt: skip


def not_needed(rng: random.Random) -> ToolChat:
    """A question that the tools at hand do not answer, answered as without them."""
    while True:
        turn = rng.choice(_OWN)(rng)
        tool = rng.choice((_weather, _table, _calculator))(rng).tool
        if len(turn.answer) < 400:
            break
    messages = [*_opening(rng), {"role": "user", "content": turn.question}]
    messages.append({"role": "assistant", "content": turn.answer})
    return ToolChat(messages, [tool.described()])


#: kind -> how often it is drawn, relative to the others, while training.
TOOL_KINDS: dict[str, tuple[Kind, float]] = {
    "weather tool": (_one_call(_weather), 7),
    "table tool": (_one_call(_table), 10),
    "calculator tool": (_one_call(_calculator), 8),
    "look-up tool": (_one_call(_lookup), 6),
    "two calls": (two_calls, 6),
    "next call": (next_call, 4),
    "failed call": (failed, 3),
    "corrected call": (corrected, 8),
    "tools not needed": (not_needed, 4),
}
_MAKERS = [maker for maker, _ in TOOL_KINDS.values()]
_WEIGHTS = [weight for _, weight in TOOL_KINDS.values()]


def tool_chat(rng: random.Random) -> ToolChat:
    """One conversation with tools to train on."""
    return rng.choices(_MAKERS, _WEIGHTS)[0](rng)
