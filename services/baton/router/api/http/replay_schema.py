"""What GET /requests/{id}?replay answers and `baton replay` reads, as types; nothing is made here.

No text of the client's is in it, but for a grammar when that was asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Uint64 = Annotated[int, msgspec.Meta(ge=0)]


class ReplayModel(msgspec.Struct, forbid_unknown_fields=True):
    """digest: of the weights. Only the same ones make the same tokens."""

    name: str
    digest: str


class ReplaySampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """seed: the one in use, named by the client or not. logit_bias: pairs of id and bias."""

    seed: Uint64
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[TokenId, float]]
    allowed_token_ids: list[TokenId]


class ReplayStop(msgspec.Struct, forbid_unknown_fields=True):
    """Without stop strings: outputs say how far to compare."""

    max_tokens: Count
    min_tokens: Count
    stop_token_ids: list[TokenId]
    ignore_eos: bool


class ReplayGrammar(msgspec.Struct, forbid_unknown_fields=True):
    """text: null unless it was asked for."""

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    digest: str
    text: str | None


class ReplayOutput(msgspec.Struct, forbid_unknown_fields=True):
    """Of one choice. sha256: hex, over its ids as little-endian int32."""

    tokens: Count
    sha256: str


class ReplayFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """exact: all its workers ran in exact mode, so that the same tokens are promised elsewhere."""

    object: Literal["baton.replay"]
    version: Literal[1]
    request_id: str
    model: ReplayModel
    exact: bool
    prompt_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    n: Annotated[int, msgspec.Meta(ge=1)]
    sampling: ReplaySampling
    stop: ReplayStop
    grammar: ReplayGrammar | None
    outputs: Annotated[list[ReplayOutput], msgspec.Meta(min_length=1)]
