"""What this machine can and cannot do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batonlm.engine.quantized import settle


def _multiplies_bytes() -> bool:
    return settle("int8", torch.device("cpu"), torch.float32) == "int8"


needs_int8 = pytest.mark.skipif(not _multiplies_bytes(), reason="oneDNN has no quick int8 here")


def _numpy_rows_stand_alone() -> bool:
    draw = np.random.default_rng(0)
    for inner, outer in ((64, 16), (64, 256), (80, 256), (256, 64)):
        rows = draw.standard_normal((16, inner), dtype=np.float32)
        matrix = draw.standard_normal((inner, outer), dtype=np.float32)
        whole = rows @ matrix
        if any((rows[:count] @ matrix != whole[:count]).any() for count in (1, 2, 4, 8)):
            return False
    return True


def check_interpreter(device: str) -> None:
    """Skips a test of exactness where Triton's interpreter cannot show it: products are numpy's,
    and on some CPUs numpy gives a row other bits with other neighbours."""
    if device == "cpu" and not _numpy_rows_stand_alone():
        pytest.skip("numpy's products of a row depend on its neighbours on this CPU")
