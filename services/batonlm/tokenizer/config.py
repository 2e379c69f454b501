"""The options of a tokenizer process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batonlm.rpc.config import option
from batonlm.rpc.options import ServingOptions


@dataclass(frozen=True, slots=True)
class TokenizerConfig(ServingOptions):
    """One tokenizer: text and chats become token ids."""

    REMOVED: ClassVar = ServingOptions.REMOVED | {"max_render_ms", "max_cache_mib"}

    workers: int = option(
        0,
        "threads that encode; 0: one a core, and two on a single one",
        unit="threads",
        minimum=0,
        maximum=256,
    )
    max_input_bytes: int = option(
        1 << 20,
        "longest input, before and after the chat template",
        unit="bytes",
        minimum=1024,
        maximum=1 << 25,
    )
    allow_client_templates: bool = option(
        False, "render chat templates that clients bring, in processes of their own"
    )
    special_tokens_in_text: bool = option(
        False, "take control tokens that the texts of a conversation spell for control tokens"
    )
