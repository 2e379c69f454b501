"""Which tokens of a tokenizer are control tokens, and how text that only spells some is encoded.

A control token is an added one that is special, or that is spelled as those which mark turns are:
`<|…|>`, also with DeepSeek's bars. `<think>` or `<tool_call>` that a tokenizer does not call
special is none: clients and templates write them alike. A mere word or a blank is none either,
whatever the files call it.

Text with spellings that are to stay text is encoded by a twin of the tokenizer, in which control
tokens are spelled in a way that nobody knows. So the ids are those that the tokenizer would give if
what is spelled were no token, with everything beside it as it would be.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.core.request.tool_formats import MARKERS

_BARRED = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_SECRET_LETTERS = 40
_NO_NORMALIZER = (None, {"type": "Sequence", "normalizers": []})


class ControlTokens:
    """Of one tokenizer. May be used on several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        control = {token_id: token for token_id, token in added.items() if _is_control(token)}
        self.spellings = list(dict.fromkeys(token.content for token in control.values()))
        self.spoken = [text for text in self.spellings if text in MARKERS]
        """What a model writes itself, so that an assistant's message may hold it."""
        self._single_words = {t.content for t in control.values() if t.single_word}
        self.found_normalized = _normalizes(tokenizer) and any(
            token.normalized for token in control.values()
        )
        """Whether text that spells none may become one."""
        self._secrets = {text: _secret(text) for text in self.spellings}
        self._twin = _twin(tokenizer, self._secrets)
        self._twin.add_tokens([_renamed(token, self._secrets) for token in added.values()])
        self._ids = {
            self._twin.token_to_id(self._secrets.get(token.content, token.content)): token_id
            for token_id, token in added.items()
        }

    def encode(self, text: str, own: Sequence[tuple[int, int]]) -> array[int]:
        """Ids of a text in which only these spans are control tokens."""
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
        """As the library sees it, so that no secret ever stays text."""
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
    """Lower case letters: no normalizer changes them, and no text holds them by chance. Its ends
    are those of the text, for a neighbour may ask whether they belong to a word."""
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
    """The same without added tokens, whose model makes no control token of its spelling. Shares the
    tokenizer's parts, if its model makes none anyway."""
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
    """In the model's own vocabulary; not what it merges other tokens from or to: that is a word."""
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
