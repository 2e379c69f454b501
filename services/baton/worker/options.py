"""The options that prefill and decode workers share; knows not where values come from."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Model, memory and KV transport of one worker, and how it is served."""

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    model: str = option("", "folder or hub id of the model", required=True)
    model_name: str = option("", "name clients use; empty: the folder's name")
    runner: str = option("torch", "what runs steps", choices=("torch", "fake"))
    dtype: str = option(
        "auto", "number type of weights and KV", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = option("auto", "where steps run", choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "torch threads; 0: all cores", unit="threads", minimum=0, maximum=1024)
    exact: bool = option(True, "same tokens whatever runs beside them")
    max_model_len: int = option(0, "longest sequence; 0: the model's", unit="tokens", minimum=0)
    block_size: int = option(16, "positions of a block", unit="tokens", minimum=1, maximum=1024)
    kv_memory_mib: int = option(256, "memory for KV", unit="MiB", minimum=1)
    max_waiting: int = option(1024, "prompts that may wait; more are refused", minimum=1)
    max_waiting_tokens: int = option(
        65536, "prompt tokens that may wait; more are refused", unit="tokens", minimum=1
    )
    transport: str = option("auto", "how KV moves", choices=("auto", "nixl", "loopback"))
    slots: int = option(16, "slots of the ring that parcels pass through", minimum=2, maximum=4096)
    slot_mib: int = option(1, "size of a slot", unit="MiB", minimum=1, maximum=16)
    handover_timeout_s: float = option(
        300.0,
        "longest hand-over, the prompt's waiting and computing included",
        unit="s",
        minimum=1.0,
    )
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(
        20.0, "longest time to finish on SIGTERM", unit="s", minimum=0.0
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")
