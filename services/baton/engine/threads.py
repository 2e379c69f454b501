"""How many threads torch may use; knows the environment variables and never imports torch.

OpenMP reads its environment once, when its library is loaded, so a process calls `configure` before
anything imports torch. Waiting threads sleep instead of spinning: with prefill and decode on the
same cores spinning costs about half of the speed.
"""

from __future__ import annotations

import os
import sys

from baton.core.errors import Internal


def configure(threads: int = 0) -> None:
    """Sets the thread count (0: torch's default) and sleeping waits in this process's environment.

    An OMP_NUM_THREADS that the operator has set is kept when threads is 0. Raises Internal when
    torch is already imported, because then nothing would change.
    """
    if "torch" in sys.modules:
        raise Internal("threads must be configured before torch is imported")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["MKL_NUM_THREADS"] = str(threads)
