"""The options of every worker that serves a model over gRPC; knows not where values come from."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How a worker is reached, what it serves and how it leaves."""

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    model: str = option("", "folder of the model", required=True)
    model_name: str = option("", "name clients use; empty: the folder's name")
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(20.0, "longest time to end on SIGTERM", unit="s", minimum=0.0)
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")
