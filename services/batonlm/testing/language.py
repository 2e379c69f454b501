"""A made-up model: the next token is a hash of everything before it.

Token ids below 256 are bytes, and EOS ends an answer. The same input, seed and choice always give
the same answer, so a test can compute the expected answer whatever it does to the workers. A test
may also set the answer: text between two marks in the last message is returned as is (`says`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from batonlm.core.request.model import KvLayout, ModelDescription
from batonlm.core.request.request import FinishReason

EOS = 256
VOCAB = 257
LONGEST = 4096

MODEL = ModelDescription("made-up", "d1", LONGEST, VOCAB, (EOS,), "t1")
LAYOUT = KvLayout("d1", "float32", 2, 1, 8, 8)


def next_token(input_ids: Sequence[int], seed: int, choice: int, *, may_end: bool) -> int:
    """Returns the token after input_ids (prompt and output): the scripted one if the input has a
    script, else a hash of which one in 64 ends the answer, if may_end."""
    scripted = _scripted(input_ids)
    if scripted is not None:
        return scripted
    text = f"{seed} {choice} {' '.join(map(str, input_ids))}"
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    if may_end and number % 64 == 0:
        return EOS
    return b"abcdefghijklmnopqrstuvwxyz "[(number >> 8) % 27]


def answer(
    prompt: Sequence[int], seed: int, choice: int, max_tokens: int, *, ignore_eos: bool = False
) -> tuple[tuple[int, ...], FinishReason]:
    """Returns the whole answer, as an undisturbed worker would make it."""
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token([*prompt, *output], seed, choice, may_end=not ignore_eos)
        output.append(token)
        if token == EOS:
            return tuple(output), FinishReason.STOP
    return tuple(output), FinishReason.LENGTH


def logprob(token: int) -> float:
    """Returns the log-probability that workers report for a token."""
    return -float(token % 7) / 8


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(token for token in token_ids if token < 256).decode("latin-1")


def stopped(token_ids: Sequence[int], stop: str) -> tuple[tuple[int, ...], str] | None:
    """Returns the tokens up to the end of a stop string, and the text before it; None without a
    match."""
    text = text_of(token_ids)
    found = text.find(stop)
    if found < 0:
        return None
    return tuple(token_ids[: found + len(stop)]), text[:found]


BEGIN, END = "\x02", "\x03"
_SCRIPT = re.compile(rb"\x02([^\x03]*)\x03\n")


def says(text: str) -> str:
    """Returns a message to which the answer is the given text."""
    return f"{BEGIN}{text}{END}"


def _scripted(input_ids: Sequence[int]) -> int | None:
    """Returns the next byte of the script, 256 at its end, None without a script."""
    text = bytes(token for token in input_ids if token < 256)
    found = _SCRIPT.search(text)
    if found is None:
        return None
    so_far = len(text) - found.end()
    return found[1][so_far] if so_far < len(found[1]) else 256
