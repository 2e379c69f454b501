"""Turns one prompt into checked token ids and prefix hashes. Knows nothing of gRPC.

Called on several threads at once; the tokenizer releases the GIL while it encodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import BatonError, Internal, InvalidArgument
from baton.core.prefix import prefix_hashes
from baton.core.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from baton.tokenizer.chat import ChatTemplate
from baton.tokenizer.files import TokenizerFiles


@dataclass(frozen=True, slots=True)
class Encoded:
    """prefix_hashes: 16 bytes per full unit of 64 tokens, concatenated."""

    token_ids: Sequence[int]
    prefix_hashes: bytes


class Encoder:
    """namespace: what keys the prefix hashes besides the tenant's salt.

    max_input_bytes: longest text, in UTF-8, before and after a chat template; also the most ids.
    max_render_s: CPU time a chat template may take. Raises InvalidArgument (`model`) when the chat
    template is broken.
    """

    def __init__(
        self, files: TokenizerFiles, *, namespace: str, max_input_bytes: int, max_render_s: float
    ) -> None:
        self._tokenizer = files.tokenizer
        self._namespace = namespace
        self._max_input_bytes = max_input_bytes
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )
        self._template = files.chat_template and ChatTemplate(
            files.chat_template,
            files.special_tokens,
            cpu_s=max_render_s,
            max_characters=max_input_bytes,
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    def encode(self, prompt: Prompt, cache_salt: bytes) -> Encoded:
        """Raises InvalidArgument naming `prompt` or `messages`, or Internal."""
        try:
            match prompt:
                case TextPrompt(text, add_special_tokens):
                    field = "prompt"
                    token_ids = self._encode_text(text, add_special_tokens, field)
                case ChatPrompt():
                    field = "messages"
                    token_ids = self._encode_text(self._render(prompt), False, field)
                case TokenPrompt(given):
                    field = "prompt"
                    token_ids = self._check_ids(given)
            if not token_ids:
                raise InvalidArgument("must have at least one token", field=field)
            return Encoded(token_ids, prefix_hashes(token_ids, cache_salt, self._namespace))
        except BatonError:
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            raise Internal("the tokenizer failed on this input") from error

    def _encode_text(self, text: str, add_special_tokens: bool, field: str) -> Sequence[int]:
        if len(text) > self._max_input_bytes or len(text.encode()) > self._max_input_bytes:
            raise self._too_long(field, "bytes of text")
        # Unlike `encode`, this releases the GIL and computes no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: Sequence[int] = encoding.ids
        return ids

    def _render(self, chat: ChatPrompt) -> str:
        if not self._template:
            raise InvalidArgument("need a chat template, and the model has none", field="messages")
        if sum(len(message.content) for message in chat.messages) > self._max_input_bytes:
            raise self._too_long("messages", "bytes of text")
        return self._template.render(chat)

    def _check_ids(self, token_ids: Sequence[int]) -> Sequence[int]:
        if len(token_ids) > self._max_input_bytes:
            raise self._too_long("prompt", "tokens")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise InvalidArgument(
                f"must hold token ids from 0 to {self.vocab_size - 1}", field="prompt"
            )
        return token_ids

    def _too_long(self, field: str, unit: str) -> InvalidArgument:
        return InvalidArgument(f"must have at most {self._max_input_bytes} {unit}", field=field)
