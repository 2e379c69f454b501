"""Answers that a test writes itself: what the last message holds between two signs is said.

One token a byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BEGIN, END = "\x02", "\x03"
_SCRIPT = re.compile(rb"\x02([^\x03]*)\x03\n")


def says(text: str) -> str:
    """A message that is answered with the text."""
    return f"{BEGIN}{text}{END}"


def scripted(input_ids: Sequence[int]) -> int | None:
    """The byte that a script says next, 256 at its end; None when there is no script."""
    said = bytes(token for token in input_ids if token < 256)
    found = _SCRIPT.search(said)
    if found is None:
        return None
    so_far = len(said) - found.end()
    return found[1][so_far] if so_far < len(found[1]) else 256
