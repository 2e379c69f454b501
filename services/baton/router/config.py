"""What a router can be told; knows nothing of where the values come from."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.config import option


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router."""

    grpc_listen: str = option(
        "127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port"
    )
    http_listen: str = option(
        "127.0.0.1:0", "where HTTP listens; port 0: a free one", unit="host:port"
    )
    tokenizers: tuple[str, ...] = option((), "tokenizer workers", unit="host:port")
    prefills: tuple[str, ...] = option(
        (), "prefill workers; none: decode prefills", unit="host:port"
    )
    decodes: tuple[str, ...] = option((), "decode workers", unit="host:port")
    detokenizers: tuple[str, ...] = option((), "detokenizer workers", unit="host:port")
    model: str = option("", "name of the model served; empty: whatever the workers serve")
    local_prefill_tokens: int = option(
        32, "inputs up to this long are prefilled on decode", unit="tokens", minimum=0
    )
    max_attempts: int = option(
        3, "attempts in a row that may fail without progress", minimum=1, maximum=100
    )
    request_timeout_s: float = option(
        600.0, "time a request has when it names none", unit="s", minimum=0.1
    )
    wait_timeout_s: float = option(
        30.0, "longest time a request waits for a worker", unit="s", minimum=0.0
    )
    max_requests: int = option(1024, "requests at a time; more are refused", minimum=1)
    stall_timeout_s: float = option(
        30.0, "a client that takes nothing for so long is cut", unit="s", minimum=0.1
    )
    max_unconfirmed: int = option(
        8, "positions decode runs ahead of text that may hold a stop string", minimum=1
    )
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(
        20.0, "longest time to finish on SIGTERM", unit="s", minimum=0.0
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")
