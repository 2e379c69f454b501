"""Names that stand for models: which model a conversation gets whose name stands for several.

A name's models have weights: 90 to 10 sends a tenth of all conversations to the second one. The
choice is a hash of the conversation, so all routers agree, a conversation keeps its model from turn
to turn, and when only weights change, only as many conversations move as have to.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from batonlm.core.routing.cascade import Cascade, cascade_document, cascade_from
from batonlm.core.routing.documents import checked_name, checked_number, checked_object

MAX_ALIASES = 1000
MAX_MODELS = 16
"""Of one name."""
MAX_WEIGHT = 1_000_000
START_CHARACTERS = 1024
START_TOKENS = 256
"""How much of a prompt says which conversation it is."""

Weights = tuple[tuple[str, int], ...]
"""Models with their weights, in an order that stays."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A model that also gets some requests of a name. Nobody sees its answers."""

    model: str
    share: float
    """Of the name's requests, above 0 and up to 1, drawn for each by itself."""


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that stands for models."""

    weights: Weights
    """At least one weight is above 0."""
    former: Weights = ()
    """The weights before the last change; empty: there was none."""
    shadow: Shadow | None = None
    cascade: Cascade | None = None
    """None: its models' answers are good enough."""

    @property
    def models(self) -> tuple[str, ...]:
        """The models that get conversations."""
        return tuple(model for model, weight in self.weights if weight)

    def changed(self, weights: Weights) -> Alias:
        """Returns the alias with other weights, and these as the former ones. Models that it had
        keep their places, so that few conversations move."""
        given = dict(weights)
        kept = [model for model, _ in self.weights if model in given]
        order = dict.fromkeys([*kept, *given])
        in_order = tuple((model, given[model]) for model in order)
        return replace(self, weights=in_order, former=self.weights)

    def went_back(self) -> Alias:
        """Returns the alias with its former weights, and none before them."""
        return replace(self, weights=self.former, former=())

    def model(self, key: bytes, served: Collection[str]) -> str:
        """Returns the model of a conversation: of those that are served now, or, where none is, of
        all. key: see `conversation`."""
        those = [pair for pair in self.weights if pair[0] in served and pair[1]]
        those = those or [pair for pair in self.weights if pair[1]]
        digest = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
        place = digest * sum(weight for _, weight in those) >> 64
        for model, weight in those:
            place -= weight
            if place < 0:
                return model
        raise AssertionError("a place is below the sum of all weights")


def conversation(request: Request) -> bytes:
    """Returns what stays the same from one turn of a conversation to the next: who asks, and how it
    starts, up to the first message of its user."""
    tenant = request.tenant
    start = _start(request.prompt)
    return f"{request.model}\0{tenant.name}\0{tenant.address}\0{start}".encode(errors="replace")


def _start(prompt: Prompt) -> str:
    match prompt:
        case ChatPrompt(messages=messages):
            roles = [message.role for message in messages]
            first = roles.index("user") + 1 if "user" in roles else len(messages)
            parts = (message.content[:START_CHARACTERS] for message in messages[:first][:16])
            return "\0".join(parts)
        case TextPrompt(text=text):
            return text[:START_CHARACTERS]
        case TokenPrompt(token_ids=ids):
            return " ".join(map(str, ids[:START_TOKENS]))
    return ""


def parse(text: str) -> dict[str, Alias]:
    """Returns the aliases of one JSON document, by name:

        {"aliases": {"chat": {"models": {"small": 90, "large": 10}, "former": {"small": 1},
                              "shadow": {"model": "new", "share": 0.05}}}}

    Raises InvalidArgument whose field is the place in the document.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument("is not JSON", field="aliases") from None
    whole = checked_object(document, "the document", ("aliases",))
    entries = checked_object(whole.get("aliases", {}), "aliases")
    if len(entries) > MAX_ALIASES:
        raise InvalidArgument(f"must be at most {MAX_ALIASES}", field="aliases")
    found = {}
    for name, entry in entries.items():
        where = f"aliases.{checked_name(name, 'aliases')}"
        table = checked_object(entry, where, ("models", "former", "shadow", "cascade"))
        former = checked(table["former"], f"{where}.former") if table.get("former") else ()
        shadow, cascade = table.get("shadow"), table.get("cascade")
        found[name] = Alias(
            checked(table.get("models", {}), f"{where}.models"),
            former,
            None if shadow is None else checked_shadow(shadow, f"{where}.shadow"),
            None if cascade is None else cascade_from(cascade, f"{where}.cascade"),
        )
    return found


def render(aliases: Mapping[str, Alias]) -> str:
    """Returns the JSON that `parse` reads."""
    entries = {
        name: {"models": dict(alias.weights)}
        | ({"former": dict(alias.former)} if alias.former else {})
        | ({"shadow": asdict(alias.shadow)} if alias.shadow is not None else {})
        | ({"cascade": cascade_document(alias.cascade)} if alias.cascade is not None else {})
        for name, alias in aliases.items()
    }
    return json.dumps({"aliases": entries}, indent=1) + "\n"


def checked(weights: object, where: str) -> Weights:
    """Returns weights by model. Raises InvalidArgument with `where` as its field."""
    table = checked_object(weights, where)
    for model, weight in table.items():
        checked_name(model, where)
        if not isinstance(weight, int) or isinstance(weight, bool) or not 0 <= weight <= MAX_WEIGHT:
            raise InvalidArgument(
                f"{model!r} must have a whole number from 0 to {MAX_WEIGHT}", field=where
            )
    if not 1 <= len(table) <= MAX_MODELS or not any(table.values()):
        raise InvalidArgument(
            f"must be 1 to {MAX_MODELS} models, one of them with a weight above 0", field=where
        )
    return tuple(table.items())


def checked_shadow(shadow: object, where: str) -> Shadow:
    """Raises InvalidArgument with `where` as its field."""
    table = checked_object(shadow, where, ("model", "share"))
    share = checked_number(table.get("share"), f"{where}.share", 0.0, 1.0)
    if not share:
        raise InvalidArgument("must be above 0", field=f"{where}.share")
    return Shadow(checked_name(table.get("model"), f"{where}.model"), share)
