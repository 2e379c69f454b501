"""A decode worker that takes a buffer for each hand-over and never gives it back."""

from __future__ import annotations

import sys

from batonlm.testing.worker import main
from batonlm.transfer.receiver import Collected, IncomingTransfer

run = IncomingTransfer.run


async def run_and_keep(self: IncomingTransfer) -> Collected:
    if not self.request.is_probe:
        assert self.ring.take("nobody") is not None
    return await run(self)


if __name__ == "__main__":
    IncomingTransfer.run = run_and_keep  # type: ignore[method-assign]
    sys.exit(main("decode", sys.argv[1:]))
