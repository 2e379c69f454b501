"""Runs a worker as another build of Baton would be, which its first words describe:

    python -m tests.e2e.other_build wire=2-3 model=another decode FLAGS...

wire: the range of wire versions that it speaks. model: another fake model under the same name.
"""

from __future__ import annotations

import sys
from functools import partialmethod

from batonlm.core.request import model
from batonlm.testing import worker
from batonlm.testing.fake_runner import FakeRunner


def become(what: str, value: str) -> None:
    if what == "wire":
        oldest, newest = value.split("-")
        model.OLDEST_WIRE_VERSION, model.WIRE_VERSION = int(oldest), int(newest)
    elif what == "model":
        made, next_free = FakeRunner.__init__, FakeRunner._next_free
        FakeRunner.__init__ = partialmethod(made, eos_token_ids=(5,))  # type: ignore[assignment,method-assign]
        FakeRunner._next_free = (  # type: ignore[method-assign]
            lambda self, number, row, taken: next_free(self, number + 1, row, taken)
        )
    else:
        raise SystemExit(f"no build differs in {what!r}")


def main() -> int:
    words = sys.argv[1:]
    while "=" in words[0]:
        what, _, value = words.pop(0).partition("=")
        become(what, value)
    return worker.main(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
