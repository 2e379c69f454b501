"""Inputs of known length whose content is only named, without tokens.

A simulated prompt may have a hundred thousand tokens, of which only the number and the equality of
prefixes matter. So each stretch of a prompt has a name, and two prompts share a prefix as far as
their names are equal. The hashes of blocks and units are chained hashes of names, as core's are of
tokens, computed once for all workers.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from hashlib import blake2b
from random import Random
from struct import Struct
from typing import overload

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.prefix import HASH_BYTES, UNIT_TOKENS, PrefixChain, PrefixLink
from batonlm.core.request.attempt import Attempt, ChoiceTokens, Logprobs
from batonlm.core.request.request import SamplingParams, StopParams
from batonlm.core.scheduler.drafts import Draft, Prices, Wish
from batonlm.core.scheduler.plan import CompiledGrammar
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.core.scheduler.sequence import Sequence, SequenceGroup, StopRule, validate_sizes

_PLACE = Struct("<qq").pack
_OWN = -1
"""Not a name: content that only one prompt has."""


class Prompt:
    """length: in tokens. names: of stretches of `stretch` tokens, the last of which may be shorter;
    tokens beyond them are unique to this prompt. own: identifies the prompt; at least 0.

    Raises InvalidArgument for a stretch that is not a multiple of a unit.
    """

    __slots__ = ("_links", "_units", "length", "names", "own", "stretch")

    def __init__(self, own: int, length: int, names: Many[int] = (), stretch: int = 512):
        if stretch < 1 or stretch % UNIT_TOKENS:
            raise InvalidArgument(f"must be a multiple of {UNIT_TOKENS}", field="stretch")
        self.own = own
        self.length = length
        self.names = names
        self.stretch = stretch
        self._units = b""
        self._links: dict[int, list[PrefixLink]] = {}

    @property
    def hashes(self) -> bytes:
        """Returns the concatenated hashes of its full units, which a router looks up."""
        if not self._units:
            self._units = b"".join(self._chain(UNIT_TOKENS))
        return self._units

    def links(self, size: int) -> list[PrefixLink]:
        """Returns the links of its full blocks. size: positions of a block, a divisor of a
        stretch."""
        known = self._links.get(size)
        if known is None:
            known, parent = [], b""
            for index, digest in enumerate(self._chain(size)):
                units = self._units_of(index, size)
                known.append(PrefixLink(digest, parent, self._content(index * size), index, units))
                parent = digest
            self._links[size] = known
        return known

    def own_link(self, parent: bytes, index: int, size: int) -> PrefixLink:
        """Returns the link of a block that extends into the output."""
        content = _PLACE(_OWN - self.own, index)
        digest = _hash(parent, content)
        return PrefixLink(digest, parent, content, index, self._units_of(index, size))

    def forget(self) -> None:
        """Drops what can be computed again."""
        self._units, self._links = b"", {}

    def _content(self, first: int) -> bytes:
        at, offset = divmod(first, self.stretch)
        if at < len(self.names):
            return _PLACE(self.names[at], offset)
        return _PLACE(_OWN - self.own, first)

    def _chain(self, size: int) -> list[bytes]:
        """Returns a digest for each full part of so many tokens, over all tokens up to its end."""
        found, previous, content = [], b"", self._content
        for first in range(0, self.length - size + 1, size):
            previous = blake2b(previous + content(first), digest_size=HASH_BYTES).digest()
            found.append(previous)
        return found

    def _units_of(self, index: int, size: int) -> tuple[bytes, ...]:
        """Returns the hashes of units that end in a block."""
        hashes = self.hashes
        if size == UNIT_TOKENS and HASH_BYTES * index < len(hashes):
            return (hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)],)
        units = range(index * size // UNIT_TOKENS, (index + 1) * size // UNIT_TOKENS)
        return tuple(
            hashes[HASH_BYTES * unit : HASH_BYTES * (unit + 1)]
            or _hash(b"", _PLACE(_OWN - self.own, unit))
            for unit in units
        )


class Text(Many[int]):
    """A prompt and `made` output tokens, which are only counted."""

    __slots__ = ("length", "prompt")

    def __init__(self, prompt: Prompt, made: int = 0) -> None:
        self.prompt = prompt
        self.length = prompt.length + made

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Many[int]: ...

    def __getitem__(self, index: int | slice) -> int | Many[int]:
        """Every token is its own position, so a slice takes no memory."""
        return range(self.length)[index]


class NamedChain(PrefixChain):
    """A prompt's prefix chain, from its names."""

    __slots__ = ("_prompt",)

    def __init__(self, prompt: Prompt, block_size: int):
        super().__init__(b"", b"", block_size)
        self._prompt = prompt

    def extend(self, token_ids: Many[int], num_blocks: int) -> None:
        links, size = self.links, self._block_size
        if len(links) < num_blocks:
            links += self._prompt.links(size)[len(links) : num_blocks]
        for index in range(len(links), num_blocks):
            parent = links[-1].digest if links else b""
            links.append(self._prompt.own_link(parent, index, size))

    def fork(self) -> PrefixChain:
        chain = NamedChain(self._prompt, self._block_size)
        chain.links = self.links.copy()
        return chain


def _hash(previous: bytes, content: bytes) -> bytes:
    return blake2b(previous + content, digest_size=HASH_BYTES).digest()


TOKEN = 0
"""The token that every step samples."""
WRONG = 1
"""A draft that no step samples."""

VOCABULARY = 1

_GREEDY = SamplingParams(temperature=0.0)


def attempt_of(
    request_id: str, number: int, prompt: Prompt, output_tokens: int, made: int = 0
) -> Attempt:
    """Returns an attempt for a `CountingScheduler`. made: output tokens of earlier attempts."""
    return Attempt(
        request_id=request_id,
        attempt=number,
        choices=(0,),
        token_ids=Text(prompt, made),
        num_prompt_tokens=prompt.length,
        sampling=_GREEDY,
        stop=StopParams(max_tokens=output_tokens, ignore_eos=True),
    )


class CountingSequence(Sequence):
    """A sequence that counts its tokens instead of storing them."""

    __slots__ = ("_text",)

    def __init__(self, sequence_id: int, attempt: Attempt, rule: StopRule, prompt: Prompt):
        super().__init__(sequence_id, attempt, 0, rule)
        self.tokens = self._text = Text(prompt, attempt.position)

    def accept(self, token_id: int, logprobs: Logprobs | None) -> ChoiceTokens:
        self._text.length += 1
        size = self._text.length
        self._last = last = (token_id,)
        position = size - self._num_prompt - 1
        if size >= self.rule.max_positions:
            return ChoiceTokens(self.key, position, last, (), *self.rule.ends(position, token_id))
        return ChoiceTokens(self.key, position, last)

    def advance(self, steps: int) -> None:
        """Applies so many steps with a token each, none of which ends the sequence."""
        self._text.length += steps
        self.num_computed_tokens += steps


class CountingDrafter:
    """Implements core's `Drafter`: each draft is right with a given probability, which is known.

    number: of its worker, so that the same fleet does the same again.
    """

    kinds = ("simulated",)
    computes = False
    seconds = 0.0
    behind_s = 0.0

    def __init__(self, right: float, number: int) -> None:
        self._right = right
        self._random = Random(number)

    def draft(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        return [self._draft(wish.most) for wish in wishes]

    def peek(self, wishes: Many[Wish], prices: Prices) -> list[Draft]:
        return self.draft(wishes, prices)

    def forget(self, sequence_id: int) -> None:
        """Nothing is known of a sequence."""

    def _draft(self, most: int) -> Draft:
        tokens = [TOKEN if self._random.random() < self._right else WRONG for _ in range(most)]
        return Draft(tokens, [self._right] * most, self.kinds[0])


class CountingScheduler(Scheduler):
    """Core's scheduler for attempts of `attempt_of`, whose tokens are only counted. It replaces how
    a group is made of an attempt, and supports one choice per request."""

    def make_group(
        self, attempt: Attempt, now: float, max_unconfirmed: int, grammar: CompiledGrammar | None
    ) -> SequenceGroup:
        text = attempt.token_ids
        if not isinstance(text, Text):
            raise InvalidArgument("The simulator takes prompts that are named.", field="token_ids")
        validate_sizes(attempt, self._max_positions)
        rule = StopRule(attempt, self._model.eos_token_ids, self._max_model_len)
        sequence = CountingSequence(self._take_id(), attempt, rule, text.prompt)
        chain = NamedChain(text.prompt, self._pool.block_size)
        return SequenceGroup([sequence], chain, now)
