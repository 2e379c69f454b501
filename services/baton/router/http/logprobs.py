"""Log-probabilities in the two shapes OpenAI has: chat's and the older one of text completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.core.request import TextLogprob, TokenLogprobs
from baton.router.http.respond import Json

# JSON has no minus infinity; this is what OpenAI and vLLM send for "never".
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> Json:
    content = [
        _chat_token(entry.token) | {"top_logprobs": [_chat_token(top) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TextLogprob) -> Json:
    return {
        "token": token.text.decode(errors="replace"),
        "logprob": max(token.logprob, _LOWEST),
        "bytes": list(token.text),
    }


class CompletionLogprobs:
    """One choice's log-probabilities; remembers where in the text the next token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> Json:
        """text_offset: in characters; a token inside a character has that character's offset."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token.text))
        return {
            "tokens": [_completion_token(entry.token) for entry in entries],
            "token_logprobs": [max(entry.token.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }


def _alternatives(entry: TokenLogprobs) -> Json:
    """Best first, then the sampled token if it is not among them, as OpenAI does."""
    found: Json = {}
    for token in (*entry.top, entry.token):
        found.setdefault(_completion_token(token), max(token.logprob, _LOWEST))
    return found


def _completion_token(token: TextLogprob) -> str:
    """Bytes that are no whole characters are spelt out, so that no two tokens look the same."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)
