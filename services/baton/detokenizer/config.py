"""What a detokenizer process can be told."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option


@dataclass(frozen=True, slots=True)
class DetokenizerConfig:
    """One detokenizer: token ids become text."""

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    model: str = option("", "folder with the model's tokenizer.json", required=True)
    model_name: str = option("", "name clients use; empty: the folder's name")
    max_texts: int = option(16_384, "texts open in one session; more are refused", minimum=1)
    max_unsent_mib: int = option(
        64, "what a router may leave unread before its session ends", unit="MiB", minimum=1
    )
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(20.0, "longest time to end on SIGTERM", unit="s", minimum=0.0)
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")
