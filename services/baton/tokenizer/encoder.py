"""Turns prompts into checked token ids and prefix hashes, and ids back.

Called on several threads at once; the tokenizer releases the GIL while it encodes and decodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import BatonError, Internal, InvalidArgument
from baton.core.kvcache.prefix import prefix_hashes
from baton.core.request.model import AnswerFormat
from baton.core.request.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from baton.core.request.tool_formats import MARKERS, left_open, reasoning_format_of, tool_format_of
from baton.tokenizer import chat_values
from baton.tokenizer.control_tokens import ControlTokens
from baton.tokenizer.files import TokenizerFiles
from baton.tokenizer.prefix_cache import PrefixCache
from baton.tokenizer.renderers import Renderers, Setup


@dataclass(frozen=True, slots=True)
class Encoded:
    """token_ids: int32. prefix_hashes: 16 bytes per full unit of 64 tokens, concatenated.
    reasoning_open: whether a chat's prompt ends within reasoning."""

    token_ids: array[int]
    prefix_hashes: bytes
    reasoning_open: bool = False


class Asked(NamedTuple):
    """A prompt, and the salt of whoever asks."""

    prompt: Prompt
    cache_salt: bytes


@dataclass(slots=True)
class _Work:
    """One prompt on its way. field: what errors name. text: what is encoded, if it has no ids."""

    field: str
    cache_salt: bytes
    text: str = ""
    add_special_tokens: bool = False
    own: list[tuple[int, int]] | None = None
    """Where the text has control tokens; None: wherever they are spelled."""
    token_ids: array[int] | None = None
    reasoning_open: bool = False
    error: BatonError | None = None


class Encoder:
    """namespace: what keys the prefix hashes besides the tenant's salt.

    max_input_bytes: longest text, in UTF-8, before and after a chat template; also the most ids.
    max_cache_bytes: of encoded conversations that are kept. renderers: where the model's chat
    template runs. client_renderers: where templates of clients run; None refuses them.
    special_tokens_in_text: what a conversation says is read for control tokens, as its template is.
    Raises InvalidArgument (`model`) when the chat template is broken.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        namespace: str,
        max_input_bytes: int,
        max_cache_bytes: int,
        renderers: Renderers,
        client_renderers: Renderers | None = None,
        special_tokens_in_text: bool = False,
    ) -> None:
        self._tokenizer = files.tokenizer
        self._namespace = namespace
        self._max_input_bytes = max_input_bytes
        self._cache = PrefixCache(self._tokenizer, max_cache_bytes)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )
        self._renderers = renderers
        self._client_renderers = client_renderers
        self._control = None if special_tokens_in_text else ControlTokens(self._tokenizer)
        self._special_tokens = dict(files.special_tokens)
        self._setup = self._setup_of(files.chat_template) if files.chat_template else None
        if self._setup is not None:
            try:
                renderers.try_setup(self._setup)
            except InvalidArgument as error:
                message = f"its chat template {error.message}"
                raise InvalidArgument(message, field="model") from error
        self.answer_format = AnswerFormat(
            tool_format_of(files.chat_template or ""),
            reasoning_format_of(files.chat_template or ""),
            tuple(self._markers()),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._setup is not None

    def encode(self, asked: Sequence[Asked]) -> list[Encoded | BatonError]:
        """Each prompt, or why not: InvalidArgument naming the field at fault, or Internal.

        Texts that no earlier one can help with go to the library together: that is quicker than
        one by one.
        """
        works = [self._begin(prompt, salt) for prompt, salt in asked]
        for add_special_tokens in (False, True):
            self._encode_together(
                [
                    work
                    for work in works
                    if isinstance(work, _Work)
                    and work.token_ids is None
                    and work.add_special_tokens is add_special_tokens
                ],
                add_special_tokens,
            )
        return [self._end(work) if isinstance(work, _Work) else work for work in works]

    def _begin(self, prompt: Prompt, salt: bytes) -> _Work | BatonError:
        try:
            match prompt:
                case TextPrompt(text, add_special_tokens):
                    work = _Work("prompt", salt, text, add_special_tokens)
                case ChatPrompt():
                    work = self._rendered(prompt, salt)
                case TokenPrompt(given):
                    checked = self._check_ids(given, "prompt")
                    work = _Work("prompt", salt, token_ids=array("i", checked))
            self._check_size(work.text, work.field)
            if work.own is not None and self._control is not None:
                work.token_ids = self._control.encode(work.text, work.own)
            if work.token_ids is None and not work.add_special_tokens:
                work.token_ids = self._cache.encode(work.text, salt, self._encode_texts)
            return work
        except BatonError as error:
            return error
        except BaseException as error:  # a panic of the Rust library is not an Exception
            return _failed(error)

    def _markers(self) -> Iterator[tuple[str, int]]:
        """Those that models write as one token."""
        for marker in MARKERS:
            ids = self._tokenizer.encode(marker, add_special_tokens=False).ids
            if len(ids) == 1:
                yield marker, ids[0]

    def _encode_together(self, works: Sequence[_Work], add_special_tokens: bool) -> None:
        if not works:
            return
        try:
            found = self._encode_texts([work.text for work in works], add_special_tokens)
        except BaseException as error:
            if len(works) == 1:
                works[0].error = _failed(error)
                return
            for work in works:
                self._encode_together([work], add_special_tokens)
            return
        for work, token_ids in zip(works, found, strict=True):
            work.token_ids = token_ids

    def _end(self, work: _Work) -> Encoded | BatonError:
        if work.error is not None:
            return work.error
        if not work.token_ids:
            return InvalidArgument("must have at least one token", field=work.field)
        hashes = prefix_hashes(work.token_ids, work.cache_salt, self._namespace)
        return Encoded(work.token_ids, hashes, work.reasoning_open)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of a whole list of ids. Raises InvalidArgument naming `tokens`, or Internal."""
        self._check_ids(token_ids, "tokens")
        try:
            # Unlike `decode`, this releases the GIL.
            (text,) = self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        except BaseException as error:  # as above
            raise Internal("the tokenizer failed on these ids") from error
        return str(text)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it; "" for an id without a token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool = False
    ) -> Sequence[array[int]]:
        # Unlike `encode`, this releases the GIL and computes no offsets.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [array("i", encoding.ids) for encoding in encodings]

    def _check_size(self, text: str, field: str) -> None:
        if len(text) > self._max_input_bytes or len(text.encode()) > self._max_input_bytes:
            raise self._too_long(field, "bytes of text")

    def _rendered(self, chat: ChatPrompt, salt: bytes) -> _Work:
        renderers, setup = self._renderers, self._setup
        if chat.template:
            if self._client_renderers is None:
                raise InvalidArgument(
                    "is not accepted here: the model's own is used", field="template"
                )
            renderers, setup = self._client_renderers, self._setup_of(chat.template)
        if setup is None:
            raise InvalidArgument("need a chat template, and the model has none", field="messages")
        if chat_values.size(chat) > self._max_input_bytes:
            raise self._too_long("messages", "bytes of text")
        rendered = renderers.render(setup, chat)
        return _Work(
            "messages",
            salt,
            rendered.text,
            own=rendered.own,
            reasoning_open=left_open(rendered.text, chat),
        )

    def _setup_of(self, template: str) -> Setup:
        if self._control is None:
            return Setup(template, self._special_tokens)
        return Setup(
            template,
            self._special_tokens,
            self._control.spellings,
            self._control.spoken,
            self._control.found_normalized,
        )

    def _check_ids(self, token_ids: Sequence[int], field: str) -> Sequence[int]:
        if len(token_ids) > self._max_input_bytes:
            raise self._too_long(field, "tokens")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise InvalidArgument(
                f"must hold token ids from 0 to {self.vocab_size - 1}", field=field
            )
        return token_ids

    def _too_long(self, field: str, unit: str) -> InvalidArgument:
        return InvalidArgument(f"must have at most {self._max_input_bytes} {unit}", field=field)


def _failed(error: BaseException) -> Internal:
    failure = Internal("the tokenizer failed on this input")
    failure.__cause__ = error
    return failure
