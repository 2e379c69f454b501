"""Settles, before any test module is imported, how Triton's kernels run."""

from __future__ import annotations

import os
from pathlib import Path

# Without a GPU, kernels run in Triton's interpreter. Triton decides when it is first imported, and
# modules of any test may do that on their way: so this comes before all of them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
