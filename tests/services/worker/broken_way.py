"""A decode worker whose loopback reads bring other bytes as long as the file $BROKEN exists."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from batonlm.testing.worker import main
from batonlm.transfer.loopback import LoopbackTransport

post = LoopbackTransport.post


def post_and_break(
    self: LoopbackTransport, peer: str, remote_buffer: int, local_buffer: int, num_bytes: int
) -> object:
    handle = post(self, peer, remote_buffer, local_buffer, num_bytes)
    if Path(os.environ["BROKEN"]).exists():
        self._ring.view(local_buffer)[num_bytes - 1] ^= 1
    return handle


if __name__ == "__main__":
    LoopbackTransport.post = post_and_break  # type: ignore[method-assign]
    sys.exit(main("decode", sys.argv[1:]))
