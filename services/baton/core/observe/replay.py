"""What makes a request's tokens again elsewhere: the ids it started from how they were drawn."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from baton.core.request.grammar import Grammar
from baton.core.request.model import ModelDescription
from baton.core.request.request import SamplingParams, StopParams


def packed(token_ids: Sequence[int]) -> bytes:
    """As they travel: little-endian int32."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(ids: bytes) -> array[int]:
    """What `packed` made, as numbers."""
    found = array("i", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def digest(token_ids: Sequence[int]) -> str:
    """Names tokens without telling them: hex, of sha256 over their packed form."""
    return sha256(packed(token_ids)).hexdigest()


@dataclass(frozen=True, slots=True)
class Replay:
    """prompt: packed ids. sampling: with the seed in use. exact: every worker that served it ran in
    exact mode. digests, output_tokens: one a choice, once it is over."""

    model: ModelDescription
    prompt: bytes
    n: int
    sampling: SamplingParams
    stop: StopParams
    grammar: Grammar | None = None
    exact: bool = True
    digests: tuple[str, ...] = ()
    output_tokens: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        grammar = len(self.grammar.text) if self.grammar is not None else 0
        lists = len(self.sampling.logit_bias) * 2 + len(self.sampling.allowed_token_ids)
        return len(self.prompt) + grammar + 32 * lists + 160 * self.n

    def ended(self, outputs: Sequence[Sequence[int]]) -> Replay:
        """outputs: one a choice."""
        return replace(
            self,
            digests=tuple(digest(ids) for ids in outputs),
            output_tokens=tuple(len(ids) for ids in outputs),
        )
