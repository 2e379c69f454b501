"""A double of compiled grammars: what may follow is a hash of the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from batonlm.core.request.request import Grammar, GrammarKind
from tests.core.attempts import EOS, VOCAB_SIZE

ANY = Grammar(GrammarKind.LARK, "double")


def mask(token_ids: Sequence[int]) -> bytes:
    bits = bytearray((VOCAB_SIZE + 7) // 8)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


@dataclass
class HashGrammar:
    """Implements `CompiledGrammar`. Eight tokens may follow. ends_at: from this output position on
    only the end may; with may_end it is among the others before too. stuck_at: from there on
    nothing may."""

    ends_at: int = 1000
    stuck_at: int = 1000
    may_end: bool = False

    def matcher(self) -> HashMatcher:
        return HashMatcher(self)


class HashMatcher:
    def __init__(self, grammar: HashGrammar) -> None:
        self._grammar = grammar
        self.stuck = ""

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        output = tuple(tokens[first:])
        if len(output) >= self._grammar.stuck_at:
            self.stuck = "cannot be followed further"
            return bytes(1)
        if len(output) >= self._grammar.ends_at:
            return mask([EOS])
        return mask([*self.next(output), *([EOS] if self._grammar.may_end else [])])

    def allowed_behind(
        self, tokens: Sequence[int], first: int, drafts: Sequence[int]
    ) -> list[bytes]:
        masks = [self.allowed(tokens, first)]
        output = [*tokens]
        for draft in drafts if not self.stuck else ():
            if masks[-1][draft >> 3] >> (draft & 7) & 1 == 0:
                break
            output.append(draft)
            if len(output) - first >= self._grammar.stuck_at:
                break
            masks.append(self.allowed(output, first))
        return masks

    @staticmethod
    def next(output: tuple[int, ...]) -> list[int]:
        """What may follow, besides the end."""
        digest = blake2b(repr(output).encode(), digest_size=8).digest()
        found = {number % VOCAB_SIZE for number in digest} - {EOS}
        return sorted(found)


def follows(output: Sequence[int]) -> bool:
    """Whether every token but an end was allowed where it stands."""
    return all(
        token in HashMatcher.next(tuple(output[:position])) or token == EOS
        for position, token in enumerate(output)
    )
