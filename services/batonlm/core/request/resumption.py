"""Which part of a stream its client has, so that a second run of the request leaves that part out.

Every event of such a stream has an id: `<stream id>.<mark>.<position>`. A client that lost its
router sends the id of the last event that it has, with the same request, to any router. That one
runs the request again, with the same seed, and leaves out what the client has.

A position counts what was delivered of each choice: tokens, and the characters of its text, its
reasoning and its calls. In how many events they came does not matter, because a second run is cut
into other pieces. Checksums of the characters show whether the second run says the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.request import Delta, ToolCallDelta

FIELD = "last_event_id"
"""The name of a client's last event id in errors."""

ADOPTION_ID_BYTES = 16

_MARK_BYTES = 4
_NUMBERS = r"\d{1,10}(?:,\d{1,10}){0,8}"
_EVENT_ID = re.compile(
    rf"([0-9a-f]{{32}})\.([0-9a-f]{{{2 * _MARK_BYTES}}})\.({_NUMBERS}(?:;{_NUMBERS}){{0,16}})",
    re.ASCII,
)
"""16 is the most choices of a request."""


class Passage(NamedTuple):
    """What was delivered of a text that grows."""

    length: int = 0
    """In characters."""
    checksum: int = 0

    def and_then(self, text: str) -> Passage:
        return Passage(self.length + len(text), crc32(text.encode(), self.checksum))


class ChoicePosition(NamedTuple):
    """What was delivered of one choice.

    Its characters come in the order in which the model wrote them: whoever has some of one passage
    has everything that precedes it in the others. Tokens may be ahead of their characters.
    """

    text: Passage = Passage()
    reasoning: Passage = Passage()
    arguments: Passage = Passage()
    """Of all tool calls together; their names are in the checksum, too."""
    calls: int = 0
    """Tool calls that have begun."""
    tokens: int = 0
    ended: int = 0
    """1 when its finish reason was delivered, else 0."""

    @property
    def characters(self) -> tuple[Passage, Passage, Passage, int]:
        return self[:4]

    def after(self, delta: Delta) -> ChoicePosition:
        arguments, calls = self.arguments, self.calls
        for call in delta.tool_calls:
            if call.id:
                calls += 1
                arguments = Passage(arguments.length, arguments.and_then(call.name).checksum)
            arguments = arguments.and_then(call.arguments)
        return ChoicePosition(
            self.text.and_then(delta.text) if delta.text else self.text,
            self.reasoning.and_then(delta.reasoning) if delta.reasoning else self.reasoning,
            arguments,
            calls,
            self.tokens + len(delta.token_ids),
            1 if delta.finish_reason is not None else self.ended,
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """What `of` makes a position of. Most choices have text only, and zeros at the end."""
        return (self.tokens, self.ended, *self.text, *self.reasoning, *self.arguments, self.calls)

    @staticmethod
    def of(numbers: Sequence[int]) -> ChoicePosition:
        missing = [0] * (9 - len(numbers))
        tokens, ended, *passages, calls = (*numbers, *missing)
        text, reasoning, arguments = map(Passage, passages[::2], passages[1::2])
        return ChoicePosition(text, reasoning, arguments, calls, tokens, ended)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """What a client has of a stream."""

    stream_id: str
    """The id of the request that began it, which nobody can guess, or that of its idempotency key.
    """
    created: int = 0
    """When it began, in seconds since 1970, where its events say so."""
    choices: tuple[ChoicePosition, ...] = ()
    """Of the choices that the client knows of, from the first one on."""
    finished: bool = False
    """Whether what follows the last choice was delivered, too."""

    @staticmethod
    def parse(event_id: str, tenant: str) -> StreamPosition:
        """tenant: the name of the one who shows the id. Raises InvalidArgument."""
        found = _EVENT_ID.fullmatch(event_id)
        if found is None:
            raise InvalidArgument(f"{FIELD} is no id of an event of a stream", field=FIELD)
        stream_id, mark, position = found.groups()
        if mark != _mark(stream_id, tenant):
            raise InvalidArgument(f"{FIELD} is of a stream of another tenant", field=FIELD)
        (created, *rest), *choices = (
            [int(number) for number in numbers.split(",")] for numbers in position.split(";")
        )
        each = tuple(map(ChoicePosition.of, choices))
        return StreamPosition(stream_id, created, each, finished=any(rest))

    def event_id(self, tenant: str) -> str:
        """The inverse of `parse`."""
        parts = [(self.created, int(self.finished)), *(each.numbers for each in self.choices)]
        position = ";".join(map(_written, parts))
        return f"{self.stream_id}.{_mark(self.stream_id, tenant)}.{position}"


def _written(numbers: Sequence[int]) -> str:
    """Writes numbers without the zeros at their end."""
    count = next((count for count in range(len(numbers), 1, -1) if numbers[count - 1]), 1)
    return ",".join(map(str, numbers[:count]))


def _mark(stream_id: str, tenant: str) -> str:
    """Says whose stream it is. It is no secret: it finds a wrong key, not a forged id."""
    return blake2b(
        tenant.encode(), key=bytes.fromhex(stream_id), digest_size=_MARK_BYTES
    ).hexdigest()


def keyed_stream_id(tenant: str, key: str, place: int) -> str:
    """Returns the id of the stream of a request with an idempotency key: the same at any router.
    place: of the prompt in its call."""
    words = "\0".join((tenant, str(place), key))
    return blake2b(words.encode(), digest_size=16, person=b"baton key").hexdigest()


def adoption_id(tenant: str, stream_id: str, choice: int) -> bytes:
    """Returns the id by which a router finds a choice's sequence whose router is gone: the same at
    any router, for the tenant whose stream it is, and for nobody else."""
    words = "\0".join((tenant, stream_id, str(choice)))
    return blake2b(words.encode(), digest_size=ADOPTION_ID_BYTES, person=b"baton adoption").digest()


class EventIds:
    """The ids of the events of one run, from which it leaves out what its client has.

    Events are numbered in the order in which they are sent: `opened` for one that begins a choice,
    `split` for a delta, then `of_events` for the events that are made of it, `finished` for what
    follows the last choice.
    """

    def __init__(self, position: StreamPosition, tenant: str, n: int) -> None:
        """position: what the client has, of a new stream nothing. n: the number of choices. Raises
        InvalidArgument for a position of more choices."""
        if len(position.choices) > n:
            raise _another_request()
        self._position = position
        self._tenant = tenant
        self._client = [*position.choices, *(ChoicePosition() for _ in range(n))][:n]
        """What the client has of each choice, with what this run has sent."""
        self._run = [ChoicePosition()] * n
        """What this run has generated of each choice."""
        self.num_opened = len(position.choices)
        """Choices whose beginning the client has."""
        self.has_all = position.finished
        """Whether the client has what follows the last choice."""

    def opened(self) -> str:
        """Returns the id of the event that begins the next choice."""
        self.num_opened += 1
        return self._event_id(self._client[: self.num_opened])

    def split(self, delta: Delta) -> tuple[Delta, Delta]:
        """Returns the part of a delta that the client has, and the part that it has not, which is
        to be sent. Raises InvalidArgument when this run says something else than the stream did."""
        choice = delta.choice
        run, client = self._run[choice], self._client[choice]
        if run == client:
            self._run[choice] = self._client[choice] = client.after(delta)
            return Delta(choice), delta
        had, new = _split(delta, run, client)
        known = run.after(had)
        goes_on = new.text or new.reasoning or new.tool_calls or delta.finish_reason is not None
        if goes_on and known.characters != client.characters:
            raise _another_request()
        self._run[choice], self._client[choice] = run.after(delta), client.after(new)
        # A choice that has ended has nothing new.
        if client.ended and self._client[choice] != client:
            raise _another_request()
        if delta.finish_reason is not None and self._run[choice] != self._client[choice]:
            raise _another_request()
        return had, new

    def reached(self) -> str:
        """Returns the id of the event that was made of what `split` returned last."""
        return self._event_id(self._client)

    def of_events(self, choice: int, count: int) -> list[str]:
        """Returns the ids of the events that were made of what `split` returned last, for this
        choice. Its end is in the last one."""
        if not count:
            return []
        before = [*self._client]
        before[choice] = before[choice]._replace(ended=0)
        return [*(self._event_id(before) for _ in range(count - 1)), self.reached()]

    def finished(self) -> str:
        """Returns the id of the event that follows the last choice."""
        self.has_all = True
        return self._event_id(self._client)

    def _event_id(self, choices: Sequence[ChoicePosition]) -> str:
        position = replace(self._position, choices=tuple(choices), finished=self.has_all)
        return position.event_id(self._tenant)


def _split(delta: Delta, run: ChoicePosition, client: ChoicePosition) -> tuple[Delta, Delta]:
    tokens = max(0, client.tokens - run.tokens)
    text = max(0, client.text.length - run.text.length)
    reasoning = max(0, client.reasoning.length - run.reasoning.length)
    calls, arguments = client.calls - run.calls, client.arguments.length - run.arguments.length
    had_calls, new_calls = _split_calls(delta.tool_calls, calls, arguments)
    had = replace(
        delta,
        text=delta.text[:text],
        token_ids=delta.token_ids[:tokens],
        logprobs=delta.logprobs[:tokens],
        reasoning=delta.reasoning[:reasoning],
        tool_calls=had_calls,
    )
    new = replace(
        delta,
        text=delta.text[text:],
        token_ids=delta.token_ids[tokens:],
        logprobs=delta.logprobs[tokens:],
        reasoning=delta.reasoning[reasoning:],
        tool_calls=new_calls,
    )
    if client.ended:
        return had, replace(new, finish_reason=None, stop_string=None, stop_token_id=None)
    return replace(had, finish_reason=None, stop_string=None, stop_token_id=None), new


def _split_calls(
    calls: Sequence[ToolCallDelta], begun: int, arguments: int
) -> tuple[tuple[ToolCallDelta, ...], tuple[ToolCallDelta, ...]]:
    """begun, arguments: how many more calls the client knows, and characters of arguments."""
    had, new = [], []
    for call in calls:
        known = not call.id or begun > 0
        begun -= bool(call.id)
        if not known:
            new.append(call)
            continue
        cut = min(max(0, arguments), len(call.arguments))
        arguments -= cut
        if cut or call.id:
            had.append(replace(call, arguments=call.arguments[:cut]))
        if cut < len(call.arguments):
            new.append(ToolCallDelta(call.index, arguments=call.arguments[cut:]))
    return tuple(had), tuple(new)


def _another_request() -> InvalidArgument:
    return InvalidArgument(
        f"{FIELD} is of a stream that said something else: it was of another request, or the model "
        "does not answer this one in the same words any more. Send it without this id, and begin "
        "anew.",
        field=FIELD,
    )
