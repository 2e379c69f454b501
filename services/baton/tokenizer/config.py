"""What a tokenizer process can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """One tokenizer: text and chats become token ids."""

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    model: str = option("", "folder with the model's tokenizer.json", required=True)
    model_name: str = option("", "name clients use; empty: the folder's name")
    workers: int = option(
        0, "threads that encode; 0: all cores", unit="threads", minimum=0, maximum=256
    )
    max_input_bytes: int = option(
        1 << 20,
        "longest input, before and after the chat template",
        unit="bytes",
        minimum=1024,
        maximum=1 << 25,
    )
    max_render_ms: int = option(
        250, "CPU time the chat template may take", unit="ms", minimum=1, maximum=60_000
    )
    max_waiting_mib: int = option(
        64, "inputs accepted and not encoded yet; more are refused", unit="MiB", minimum=1
    )
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(20.0, "longest time to end on SIGTERM", unit="s", minimum=0.0)
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")
