"""Converts prompts to checked token ids and prefix hashes, and ids to text.

It is called on several threads at once; the tokenizer releases the GIL while it encodes and
decodes.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from batonlm.core.errors import BatonError, Internal, InvalidArgument
from batonlm.core.kvcache.prefix import prefix_hashes
from batonlm.core.request.formats.families import (
    MARKERS,
    left_open,
    reasoning_format_of,
    tool_format_of,
)
from batonlm.core.request.model import AnswerFormat
from batonlm.core.request.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from batonlm.core.request.validation import wrong
from batonlm.rpc.metrics import CACHE_LOOKUPS, counter
from batonlm.rpc.model_folder import read_json, special_tokens
from batonlm.tokenizer.renderers import Renderers, Setup, chat_size


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a model's folder."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """Text by name, as chat templates receive them."""
    chat_template: str | None


def load_tokenizer(folder: Path) -> TokenizerFiles:
    """Reads the tokenizer of a model's folder. It encodes like `transformers.AutoTokenizer`, which
    is not imported:

    - Truncation and padding saved in tokenizer.json are switched off.
    - Tokens named in tokenizer_config.json (bos_token, eos_token, ...) are special, whatever
      tokenizer.json says; names of tokens that do not exist are ignored.
    - tokenizer.json alone decides which tokens are added around plain text; `add_bos_token` is
      ignored.
    - The chat template is chat_template.jinja, or else `chat_template` of tokenizer_config.json: a
      string, or a list of named ones of which "default" is used.

    Raises InvalidArgument naming `model` when the folder cannot be used.
    """
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise InvalidArgument(f"there is no folder {folder}", field="model")
    if not path.is_file():
        raise InvalidArgument(f"{folder} has no tokenizer.json", field="model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidArgument(f"{path} is not a tokenizer ({error})", field="model") from error
    named = special_tokens(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _mark_special(tokenizer, named)
    return TokenizerFiles(tokenizer, named, _chat_template(folder))


def _mark_special(tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(named.values())
            if text not in special and tokenizer.token_to_id(text) is not None
        ]
    )


def _chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except ValueError as error:
            raise InvalidArgument(f"{path} is not UTF-8", field="model") from error
    template: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidArgument("chat_template in tokenizer_config.json is no text", field="model")
    return template


_BARRED = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_SECRET_LETTERS = 40
_NO_NORMALIZER = (None, {"type": "Sequence", "normalizers": []})


class ControlTokens:
    """The control tokens of a tokenizer, and an encoder for text that contains their spellings as
    plain text. Thread-safe.

    A control token is an added token that is special, or spelled like those that mark turns:
    `<|…|>`, also with DeepSeek's bars. `<think>` or `<tool_call>` is none unless the tokenizer
    marks it as special, since clients and templates write both; nor is a plain word or white space.

    Text with such spellings is encoded by a twin of the tokenizer whose control tokens have random
    spellings. The ids are those that the tokenizer would give if the spellings were not tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        control = {token_id: token for token_id, token in added.items() if _is_control(token)}
        self.spellings = list(dict.fromkeys(token.content for token in control.values()))
        self.spoken = [text for text in self.spellings if text in MARKERS]
        """Control tokens that models write, so that an assistant's message may contain them."""
        self._single_words = {t.content for t in control.values() if t.single_word}
        self.found_normalized = _normalizes(tokenizer) and any(
            token.normalized for token in control.values()
        )
        """Whether normalization may turn other text into a control token."""
        self._secrets = {text: _secret(text) for text in self.spellings}
        self._twin = _twin(tokenizer, self._secrets)
        self._twin.add_tokens([_renamed(token, self._secrets) for token in added.values()])
        self._ids = {
            self._twin.token_to_id(self._secrets.get(token.content, token.content)): token_id
            for token_id, token in added.items()
        }

    def encode(self, text: str, own: Sequence[tuple[int, int]]) -> array[int]:
        """The ids of a text in which only the spans `own` are control tokens."""
        pieces, done = [], 0
        for start, end in own:
            token = text[start:end]
            if token in self._single_words and self._is_in_a_word(text, start, end):
                continue
            pieces += [text[done:start], self._secrets[token]]
            done = end
        pieces.append(text[done:])
        return array("i", [self._ids.get(token_id, token_id) for token_id in self._encode(pieces)])

    def _is_in_a_word(self, text: str, start: int, end: int) -> bool:
        """Whether the library sees the token within a word and would leave its spelling as text; a
        secret spelling must not stay text."""
        secret = self._secrets[text[start:end]]
        ids = self._encode([text[max(start - 1, 0) : start], secret, text[end : end + 1]])
        return self._twin.token_to_id(secret) not in ids

    def _encode(self, pieces: Sequence[str]) -> Sequence[int]:
        # Unlike `encode`, this releases the GIL.
        (encoding,) = self._twin.encode_batch_fast(["".join(pieces)], add_special_tokens=False)
        ids: Sequence[int] = encoding.ids
        return ids


def _is_control(token: AddedToken) -> bool:
    text = token.content
    if not text.strip() or text.isalnum():
        return False
    return token.special or bool(_BARRED.fullmatch(text))


def _normalizes(tokenizer: Tokenizer) -> bool:
    normalizer = tokenizer.normalizer
    return normalizer is not None and json.loads(normalizer.__getstate__()) not in _NO_NORMALIZER


def _secret(text: str) -> str:
    """A random spelling. It is of lower-case letters, which no normalizer changes, and begins and
    ends like `text`, because the library checks whether neighbouring characters are part of a
    word."""
    middle = "".join(secrets.choice(string.ascii_lowercase) for _ in range(_SECRET_LETTERS))
    return f"{text[0]}{middle}{text[-1]}"


def _renamed(token: AddedToken, names: dict[str, str]) -> AddedToken:
    return AddedToken(
        names.get(token.content, token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _twin(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """A copy without added tokens, whose model produces no control token from its spelling. It
    shares the tokenizer's parts if the model already produces none."""
    twin = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        twin.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        twin.pre_tokenizer = tokenizer.pre_tokenizer
    if not any(_makes(twin, text) for text in names):
        return twin
    spec = json.loads(tokenizer.to_str())
    _rename(spec["model"], names)
    spec |= {"added_tokens": [], "post_processor": None, "decoder": None}
    return Tokenizer.from_str(json.dumps(spec))


def _makes(bare: Tokenizer, text: str) -> bool:
    token_id = bare.token_to_id(text)
    if token_id is None:
        return False
    ids = {token.id for token in bare.model.tokenize(text)}
    return token_id in ids | set(bare.encode(text, add_special_tokens=False).ids)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Renames tokens in the model's vocabulary, except parts and results of merges, which are
    words."""
    merged = {
        part
        for merge in model.get("merges", ())
        for pair in [merge.split(" ") if isinstance(merge, str) else merge]
        for part in (*pair, "".join(pair))
    }
    names = {text: name for text, name in names.items() if text not in merged}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


Encode = Callable[[Sequence[str]], "Sequence[array[int]]"]
"""Encodes each text by itself, without adding special tokens."""

CACHE_BYTES = 64 << 20
"""Size of a PrefixCache: the ids of encoded conversations that are kept for when they grow."""

MIN_CHARACTERS = 1024
"""Shorter texts bypass the cache: encoding them is faster than a look-up."""
MAX_CUTS = 4096
"""Texts with more cuts bypass the cache: they are no conversations."""
LOOKED_UP = 64
"""How many of a text's last cuts are looked up. A conversation grows by a few at a time."""
ENTRY_BYTES = 256
"""The size of an entry besides its ids."""


class PrefixCache:
    """The ids of conversations, for when they grow. Thread-safe.

    A text is cut only where encoding both parts gives the same ids as encoding the whole: after an
    added token that the tokenizer splits off before anything else. With S the last such token:

        ids(before S after) = ids(before S) + ids(S after) without its first id

    The second part begins with S because some tokenizers treat the start of a text differently.
    The equation holds for added tokens that are matched in the raw text (`normalized` off), exactly
    (no `lstrip`, `rstrip`, `single_word`, no space at their ends), and that no other added token
    overlaps or contains; then every occurrence of their text is a token.

    Keys are digests over the tenant's salt and the text before the cut; texts are not kept. As in
    the KV cache, which uses the same salt, a tenant cannot detect another one's entries.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokens = cut_tokens(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        """In the order of eviction: the next one first."""
        self.num_bytes = 0

    def encode(self, text: str, salt: bytes, encode: Encode) -> array[int] | None:
        """The ids of the whole text, the same as `encode` gives; None for a text that bypasses the
        cache. salt: the tenant's.
        """
        cuts = self._cuts(text)
        if not cuts:
            return None
        digests = _digests(text, salt, cuts)
        place, known = self._longest(digests)
        counter(CACHE_LOOKUPS).labels("miss" if place < 0 else "hit").inc()
        starts = [cuts[place][0] if place >= 0 else 0, cuts[-1][0]]
        if place == len(cuts) - 1:
            rest = encode([text[starts[1] :]])[0]
        else:
            middle, rest = encode([text[starts[0] : cuts[-1][1]], text[starts[1] :]])
            if place >= 0 and middle[0] != self._id_at(text, cuts[place]):
                return None
            known = known + (middle[1:] if place >= 0 else middle)
        # A safeguard against tokenizers whose rules break the equation above.
        if rest[0] != self._id_at(text, cuts[-1]):
            return None
        self._keep(digests[-1], known, grown_from=digests[place] if place >= 0 else b"")
        return known + rest[1:]

    def _cuts(self, text: str) -> list[tuple[int, int]]:
        """The spans of the last LOOKED_UP cut tokens; none for a text that bypasses the cache."""
        if len(text) < MIN_CHARACTERS or not self._max_bytes:
            return []
        cuts = [match.span() for match in islice(self._pattern.finditer(text), MAX_CUTS + 1)]
        if not cuts or len(cuts) > MAX_CUTS or cuts[-1][1] < MIN_CHARACTERS:
            return []
        return cuts[-LOOKED_UP:]

    def _id_at(self, text: str, cut: tuple[int, int]) -> int:
        return self._tokens[text[slice(*cut)]]

    def _longest(self, digests: Sequence[bytes]) -> tuple[int, array[int]]:
        """The index and the ids of the last known digest; -1 and no ids if none is known."""
        with self._lock:
            for place in reversed(range(len(digests))):
                ids = self._known.get(digests[place])
                if ids is not None:
                    self._known.move_to_end(digests[place])
                    return place, ids
        return -1, array("i")

    def _keep(self, digest: bytes, ids: array[int], *, grown_from: bytes) -> None:
        size = _size(ids)
        with self._lock:
            if digest in self._known or size > self._max_bytes:
                return
            if grown_from in self._known:  # only a branch of the conversation would use it
                self._known.move_to_end(grown_from, last=False)
            self._known[digest] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, forgotten = self._known.popitem(last=False)
                self.num_bytes -= _size(forgotten)


def cut_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The added tokens after which a text may be cut, as ids by text."""
    added = {
        token_id: token
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if not token.normalized and token.content
    }
    texts = [token.content for token in added.values()]
    together = "\0".join(texts)
    heads = {head for text in texts for head in _heads(text)}
    tails = {tail for text in texts for tail in _tails(text)}
    return {
        token.content: token_id
        for token_id, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word)
        and token.content == token.content.strip()
        and "\0" not in token.content
        and together.count(token.content) == 1
        and heads.isdisjoint(_tails(token.content))
        and tails.isdisjoint(_heads(token.content))
    }


def _heads(text: str) -> Iterable[str]:
    return (text[:end] for end in range(1, len(text)))


def _tails(text: str) -> Iterable[str]:
    return (text[start:] for start in range(1, len(text)))


def _digests(text: str, salt: bytes, cuts: Sequence[tuple[int, int]]) -> list[bytes]:
    """The digest of the text before the end of each cut."""
    hasher = blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=32)
    digests, done = [], 0
    for _, end in cuts:
        hasher.update(text[done:end].encode())
        digests.append(hasher.digest())
        done = end
    return digests


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded prompt."""

    token_ids: array[int]
    """As int32."""
    prefix_hashes: bytes
    """16 bytes per full unit of 64 tokens, concatenated."""
    reasoning_open: bool = False
    """Whether a chat's prompt ends within reasoning."""


class Asked(NamedTuple):
    """A prompt to encode."""

    prompt: Prompt
    cache_salt: bytes
    """The tenant's."""
    adapter: str = ""
    """The digest of the LoRA adapter that computes it; "": none does."""


@dataclass(slots=True)
class _Work:
    """The state of one prompt while it is encoded."""

    field: str
    """The field that errors name."""
    cache_salt: bytes
    text: str = ""
    """The text to encode, unless token_ids is set."""
    add_special_tokens: bool = False
    own: list[tuple[int, int]] | None = None
    """Where the text has control tokens; None: wherever their spellings occur."""
    token_ids: array[int] | None = None
    reasoning_open: bool = False
    error: BatonError | None = None


class Encoder:
    """Encodes prompts and decodes ids of one model.

    namespace: part of the prefix hashes' key, besides the tenant's salt. max_input_bytes: longest
    text, in UTF-8, before and after a chat template; also the most ids. max_cache_bytes: size of
    the PrefixCache. renderers: run the model's chat template. client_renderers: run clients'
    templates; None refuses them. special_tokens_in_text: spellings in a conversation's texts become
    control tokens. Raises InvalidArgument (`model`) when the chat template is broken.
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
                message = f"its chat {error.message}"
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
        """Encodes each prompt, or returns its error: InvalidArgument naming the invalid field, or
        Internal.

        Texts that bypass the cache go to the library together, which is faster than one by one.
        """
        works = [self._begin(each.prompt, each.cache_salt) for each in asked]
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
        return [
            self._end(work, each.adapter) if isinstance(work, _Work) else work
            for work, each in zip(works, asked, strict=True)
        ]

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
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            return _failed(error)

    def _markers(self) -> Iterator[tuple[str, int]]:
        """The MARKERS that are one token in this vocabulary, with their ids."""
        for marker in MARKERS:
            ids = self._tokenizer.encode(marker, add_special_tokens=False).ids
            if len(ids) == 1:
                yield marker, ids[0]

    def _encode_together(self, works: Sequence[_Work], add_special_tokens: bool) -> None:
        if not works:
            return
        try:
            found = self._encode_texts([work.text for work in works], add_special_tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if len(works) == 1:
                works[0].error = _failed(error)
                return
            for work in works:
                self._encode_together([work], add_special_tokens)
            return
        for work, token_ids in zip(works, found, strict=True):
            work.token_ids = token_ids

    def _end(self, work: _Work, adapter: str) -> Encoded | BatonError:
        if work.error is not None:
            return work.error
        if not work.token_ids:
            return wrong(work.field, "must have at least one token")
        hashes = prefix_hashes(work.token_ids, work.cache_salt, self._namespace, adapter)
        return Encoded(work.token_ids, hashes, work.reasoning_open)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of a whole list of ids. Raises InvalidArgument naming `tokens`, or Internal."""
        self._check_ids(token_ids, "tokens")
        try:
            # Unlike `decode`, this releases the GIL.
            (text,) = self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as above
            raise Internal("the tokenizer failed on these ids") from error
        return str(text)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; "" for an id without a token."""
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
                raise wrong("template", "is not accepted here: the model's own is used")
            renderers, setup = self._client_renderers, self._setup_of(chat.template)
        if setup is None:
            raise wrong("messages", "need a chat template, and the model has none")
        if chat_size(chat) > self._max_input_bytes:
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
            raise wrong(field, f"must hold token ids from 0 to {self.vocab_size - 1}")
        return token_ids

    def _too_long(self, field: str, unit: str) -> InvalidArgument:
        return wrong(field, f"must have at most {self._max_input_bytes} {unit}")


def _failed(error: BaseException) -> Internal:
    failure = Internal("the tokenizer failed on this input")
    failure.__cause__ = error
    return failure
