"""Log-probabilities in the shapes of chats, of text completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from baton.core.request.request import TextLogprob, TokenLogprobs
from baton.router.api.http.respond import Json

# JSON has no minus infinity; this is what OpenAI and vLLM send for "never".
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprobs], *, as_ids: bool = False) -> Json:
    """as_ids: tokens are named by their ids."""
    content = [
        _chat_token(entry.token, as_ids)
        | {"top_logprobs": [_chat_token(top, as_ids) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs], num_top: int) -> list[Json | None]:
    """One a token of the prompt, null for the first: by token id, the best num_top and its own.
    rank: 1 for the most likely one, null for one that is not among those looked at."""
    return [_ranked(entry, num_top) if i else None for i, entry in enumerate(entries)]


def _ranked(entry: TokenLogprobs, num_top: int) -> Json:
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
    return {
        str(token.token_id): {
            "logprob": max(token.logprob, _LOWEST),
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text.decode(errors="replace"),
        }
        for token in (*entry.top[:num_top], entry.token)
    }


def _named(token: TextLogprob) -> str:
    return f"token_id:{token.token_id}"


def _chat_token(token: TextLogprob, as_ids: bool) -> Json:
    return {
        "token": _named(token) if as_ids else token.text.decode(errors="replace"),
        "logprob": max(token.logprob, _LOWEST),
        "bytes": list(token.text),
    }


class CompletionLogprobs:
    """One choice's log-probabilities; remembers where in the text the next token begins."""

    def __init__(self, *, as_ids: bool = False) -> None:
        self._word = _named if as_ids else _completion_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> Json:
        """text_offset: in characters; a token inside a character has that character's offset."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token.text))
        return {
            "tokens": [self._word(entry.token) for entry in entries],
            "token_logprobs": [max(entry.token.logprob, _LOWEST) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def add_prompt(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """What comes first when the prompt is echoed; the first token's numbers are null."""
        told = self.add([TokenLogprobs(entry.token, entry.top[:num_top]) for entry in entries])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _alternatives(self, entry: TokenLogprobs) -> Json:
        """Best first, then the token itself if it is not among them, as OpenAI does."""
        found: Json = {}
        for token in (*entry.top, entry.token):
            found.setdefault(self._word(token), max(token.logprob, _LOWEST))
        return found


def _completion_token(token: TextLogprob) -> str:
    """Bytes that are no whole characters are spelt out, so that no two tokens look the same."""
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)
