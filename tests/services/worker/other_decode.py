"""A decode worker of another model, whose KV has another number type."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from batonlm.testing.fake_runner import FakeRunner
from batonlm.testing.worker import main

made = FakeRunner.__init__


def make_another(self: FakeRunner, *arguments: Any, **options: Any) -> None:
    made(self, *arguments, **options)
    layout = self._layout
    self._layout = replace(
        layout,
        model_digest="another",
        dtype="bfloat16",
        key_size=2 * layout.key_size,
        value_size=2 * layout.value_size,
    )


if __name__ == "__main__":
    FakeRunner.__init__ = make_another  # type: ignore[method-assign]
    sys.exit(main("decode", sys.argv[1:]))
