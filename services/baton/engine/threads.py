"""How torch may use threads and memory; knows the environment variables and never imports torch.

OpenMP reads its environment once, when its library is loaded, so a process calls `configure` before
anything imports torch. How threads wait between two parallel parts decides much: a step has
hundreds of them. Spinning threads are there at once, and a decode step of two threads took two
thirds of the time; but spinning on cores that another engine computes on made that one up to five
times slower. So threads spin for a moment only where the operator has said how many cores are
theirs, and else sleep.

Large arrays come in huge pages where the system gives them to those who ask: a step of prefill
touches hundreds of megabytes of new memory, and was a tenth faster with fewer page faults.
"""

from __future__ import annotations

import os
import sys

from baton.core.errors import Internal

_SPINS = "100000"
"""Of libgomp, some 250 microseconds: longer than from one parallel part to the next."""


def configure(threads: int = 0) -> None:
    """Sets the thread count (0: torch's default) and how threads wait, in this process's
    environment.

    An OMP_NUM_THREADS that the operator has set is kept when threads is 0. Raises Internal when
    torch is already imported, because then nothing would change.
    """
    if "torch" in sys.modules:
        raise Internal("threads must be configured before torch is imported")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if threads:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["MKL_NUM_THREADS"] = str(threads)
