"""Keeps Python's garbage collector out of the way."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 50_000


def settle() -> None:
    """To be called once everything is loaded.

    What loading made stays for good: no full collection needs to walk through it amid work. And a
    step, or a frame of tokens, makes thousands of tuples that die without the collector's help.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
