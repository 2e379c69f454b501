"""The options of an encode worker."""

from __future__ import annotations

from dataclasses import dataclass

from batonlm.engine.config import CHOICES
from batonlm.rpc.config import option
from batonlm.rpc.options import ServingOptions


@dataclass(frozen=True, slots=True)
class EncodeConfig(ServingOptions):
    """One encode worker: texts become vectors, and pairs of texts scores."""

    dtype: str = option(
        "auto",
        "number type of weights; auto: float32 on a CPU, the checkpoint's own on a GPU",
        choices=CHOICES["dtype"],
    )
    device: str = option(
        "auto",
        "where batches run: cpu; cuda, a GPU; cuda:N, the N-th that CUDA_VISIBLE_DEVICES allows; "
        "GPU-UUID or MIG-UUID; auto: a GPU where there is one",
    )
    threads: int = option(0, "torch threads; 0: all cores", unit="threads", minimum=0, maximum=1024)
