"""The configuration of the router process."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import ClassVar

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.answers import AUTO, REASONING_CHOICES, TOOL_CHOICES
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.rebalance import RebalancePolicy
from batonlm.core.routing.routing import RoutingPolicy
from batonlm.router.api.access import check_exposure
from batonlm.router.request.response_store import StoreLimits
from batonlm.router.workers.discovery import parse_target
from batonlm.rpc.address import AllowedHosts
from batonlm.rpc.config import option
from batonlm.rpc.options import ProcessOptions, needs_all
from batonlm.rpc.tls import Certificates

_PLACES = "host:port,… or dns:///name:port or k8s:///service[.namespace]:port"


_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
"""As browsers send it: no path, small letters."""

SLOW_START_S = 10.0
"""Seconds in which a new worker's share of requests grows to a full one."""


@dataclass(frozen=True, slots=True)
class RouterConfig(ProcessOptions):
    """One router."""

    REMOVED: ClassVar = frozenset(
        (
            *("metrics_open", "replicas", "kubernetes_config", "retry_share", "retry_burst"),
            *("max_queued", "head_timeout_s", "body_timeout_s", "max_unconfirmed"),
            *("request_history", "vllm_aliases", "gen_ai_metrics", "reflection"),
        )
    )

    grpc_listen: str = option(
        "127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port"
    )
    http_listen: str = option(
        "127.0.0.1:0", "where HTTP listens; port 0: a free one", unit="host:port"
    )
    processes: int = option(
        1,
        "processes that share these ports and this router's part of the budgets; limits of "
        "requests and connections are for each; 0: one for each core",
        minimum=0,
        maximum=256,
    )
    metrics_listen: str = option(
        "",
        "where /metrics is served to whoever reaches it, besides HTTP; empty: on HTTP alone",
        unit="host:port",
    )
    health_listen: str = option(
        "", "where health alone answers, in plain text; empty: nowhere", unit="host:port"
    )
    keys: str = option("", "JSON file of API keys; empty: none is asked for", unit="file")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names under which HTTP answers without keys, besides this machine's own and, where other "
        "machines reach it, any address; *.name: all below it; *: every name",
    )
    public_tls_cert: str = option(
        "", "PEM file: the certificate and chain that clients are shown", unit="file"
    )
    public_tls_key: str = option("", "PEM file: its key", unit="file")
    public_tls_ca: str = option(
        "", "PEM file: clients need a certificate of this CA too; empty: none", unit="file"
    )
    tls_terminated: bool = option(
        False, "whatever is in front of this router speaks TLS with clients"
    )
    tokenizers: tuple[str, ...] = option((), f"tokenizer workers: {_PLACES}")
    prefills: tuple[str, ...] = option((), "prefill workers, likewise; none: decode prefills")
    decodes: tuple[str, ...] = option((), "decode workers, likewise")
    detokenizers: tuple[str, ...] = option((), "detokenizer workers, likewise")
    encodes: tuple[str, ...] = option((), "encode workers, likewise; none: no vectors, no scores")
    routers: tuple[str, ...] = option((), "all routers that share the budgets, likewise")
    model: tuple[str, ...] = option(
        (),
        "names of the models served, first the one of requests that name none; a request for one "
        "that has no worker waits; empty: whatever the workers serve",
    )
    model_aliases: tuple[str, ...] = option((), "other names of the first of these models")
    aliases: str = option(
        "",
        "JSON file of names that stand for one model or, by weights, several ('baton route' "
        "writes it); its changes count at once; empty: none",
        unit="file",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "web pages of these origins (https://name[:port]) may call HTTP from a browser, with a key "
        "if this router asks for one; *: pages of every origin; empty: its own pages only",
    )
    tool_format: str = option(
        AUTO,
        "how the model writes calls of tools; auto: as its chat template tells, else hermes",
        choices=TOOL_CHOICES,
    )
    reasoning_format: str = option(
        AUTO,
        "how the model marks its reasoning; auto: as its chat template tells, else none",
        choices=REASONING_CHOICES,
    )
    local_prefill_tokens: int = option(
        -1,
        "inputs with up to so many uncached tokens are prefilled on decode; -1: where the workers' "
        "measured speeds say that it takes less time",
        unit="tokens",
        minimum=-1,
    )
    collect_prefix_tokens: int = option(
        -1,
        "the worker that computes an input collects from another one's cache what that has of it, "
        "if these are so many tokens more than its own cache has; -1: if it is predicted to "
        "take at most half the time of computing them, by measured speeds; 0: never",
        unit="tokens",
        minimum=-1,
    )
    rebalance_moves: int = option(
        RebalancePolicy().moves_per_minute,
        "running sequences that may move between decode workers in a minute, with their KV, so "
        "that these are evenly loaded and none runs out of memory; 0: none",
        minimum=0,
        maximum=60_000,
    )
    rebalance_margin: float = option(
        0.25,
        "by what share of the mean a decode worker has more or fewer sequences before some move",
        minimum=0.05,
    )
    target_first_token_ms: float = option(
        2000.0,
        "first token's target, by which baton_pool_target_workers is told; 0: it is not told",
        unit="ms",
        minimum=0.0,
    )
    target_between_tokens_ms: float = option(
        50.0, "the same, between two tokens", unit="ms", minimum=0.1
    )
    target_startup_s: float = option(
        30.0, "time that a new worker takes to start, for the same", unit="s", minimum=0.0
    )
    idle_timeout_s: float = option(
        0.0,
        "a model of `model` for which no request came for so long needs no worker, which "
        "baton_pool_target_workers then says; its next request waits for one, for wait_timeout_s "
        "at most; 0: it always needs one",
        unit="s",
        minimum=0.0,
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
    max_tokens: int = option(
        0,
        "tokens of all requests at a time, prompts and longest outputs; more are refused; 0: any",
        unit="tokens",
        minimum=0,
    )
    max_queue_s: float = option(
        10.0,
        "longest time that a request may have to wait for its turn; whoever would have to wait "
        "longer is refused at once",
        unit="s",
        minimum=0.01,
    )
    stall_timeout_s: float = option(
        30.0, "a client that takes nothing for so long is cut", unit="s", minimum=0.1
    )
    max_connections: int = option(4096, "connections at a time, of HTTP and of gRPC", minimum=1)
    max_connections_per_address: int = option(
        1024, "HTTP connections from one address at a time; 0: no limit of its own", minimum=0
    )
    connection_max_age_s: float = option(
        8.0, "an older connection takes no more requests", unit="s", minimum=0.1
    )
    playground: bool = option(True, "serve a page to chat on at /, to whoever reaches HTTP")
    keep_replays: bool = option(
        False, "remember each one's prompt as token ids too, so that it can be replayed"
    )
    usage_log: str = option(
        "",
        "where a JSON line goes for each request that is over, for billing; -: standard output; "
        "empty: nowhere",
        unit="file",
    )
    responses_file: str = option(
        "",
        "SQLite file of stored responses (/v1/responses), which routers of this machine may share; "
        "empty: in memory",
        unit="file",
    )
    responses_mb: int = option(
        64,
        "stored responses, with their input, at a time; one tenant has a quarter of it at most; 0: "
        "none is stored",
        unit="MiB",
        minimum=0,
        maximum=1 << 20,
    )
    responses_idle_s: float = option(
        86_400.0,
        "a stored response that nobody used for so long is forgotten",
        unit="s",
        minimum=1.0,
    )
    timings: bool = option(
        True,
        "tell clients how long each stage of their requests took and which workers served, and "
        "explain requests that are over",
    )
    vllm_engine: bool = option(
        False, "serve vllm.grpc.engine.VllmEngine on grpc_listen too, for gateways (batonlm[vllm])"
    )
    vllm_tokenizer: str = option(
        "",
        "the model's folder: gateways get its tokenizer of VllmEngine; empty: they need their own",
        unit="folder",
    )
    drain_timeout_s: float = option(
        20.0, "longest time to finish on SIGTERM", unit="s", minimum=0.0
    )
    lame_duck_s: float = option(
        0.0,
        "on SIGTERM requests are still taken for so long, readiness off, and then for as long as "
        "connections may get old; 0: there is no other router to go to",
        unit="s",
        minimum=0.0,
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        """Raises InvalidArgument for settings that would expose the router by mistake."""
        ProcessOptions.__post_init__(self)
        if self.processes != 1 and sys.platform != "linux":
            raise InvalidArgument("must be 1: only Linux shares out connections", field="processes")
        if self.processes != 1 and self.vllm_engine:
            raise InvalidArgument(
                "must be 1 with vllm_engine: a gateway has one connection, and so one process",
                field="processes",
            )
        if self.vllm_tokenizer and not self.vllm_engine:
            raise InvalidArgument("needs vllm_engine", field="vllm_tokenizer")
        if self.keep_replays and not self.timings:
            raise InvalidArgument("needs timings", field="keep_replays")
        if self.model_aliases and not self.model:
            raise InvalidArgument("needs model", field="model_aliases")
        if self.idle_timeout_s and not (self.model and self.target_first_token_ms):
            raise InvalidArgument("needs model and target_first_token_ms", field="idle_timeout_s")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InvalidArgument(
                    f"{origin[:80]!r} must be http[s]://name[:port] in small letters, or *",
                    field="cors_origins",
                )
        needs_all(self, ("public_tls_cert", "public_tls_key"))
        if self.public_tls_ca and not self.public_tls_cert:
            raise InvalidArgument("is required with public_tls_ca", field="public_tls_cert")
        for role, texts in self.places.items():
            parse_target(texts, f"{role}s")
        check_exposure(self.faces, keys=bool(self.keys), allow_anonymous=self.allow_anonymous)
        AllowedHosts(self.http_listen, self.allowed_hosts)

    @property
    def places(self) -> dict[str, tuple[str, ...]]:
        """Returns the addresses of each role, as its option gives them."""
        return {
            "tokenizer": self.tokenizers,
            "prefill": self.prefills,
            "decode": self.decodes,
            "detokenizer": self.detokenizers,
            "encode": self.encodes,
            "router": self.routers,
        }

    @property
    def own_aliases(self) -> dict[str, Alias]:
        """What `model_aliases` says."""
        return {name: Alias(((self.model[0], 1),)) for name in self.model_aliases}

    @property
    def responses(self) -> StoreLimits:
        return StoreLimits(self.responses_mb << 20, self.responses_idle_s)

    @property
    def routing(self) -> RoutingPolicy:
        return RoutingPolicy(self.local_prefill_tokens, SLOW_START_S, self.collect_prefix_tokens)

    @property
    def rebalancing(self) -> RebalancePolicy:
        return RebalancePolicy(self.rebalance_margin, self.rebalance_moves)

    @property
    def faces(self) -> dict[str, str]:
        """The addresses where clients reach this router, by option."""
        return {"http_listen": self.http_listen, "grpc_listen": self.grpc_listen}

    def public_certificates(self) -> Certificates | None:
        """Returns None when clients connect in plain text. Raises InvalidArgument."""
        if not self.public_tls_cert:
            return None
        return Certificates(
            self.public_tls_cert, self.public_tls_key, self.public_tls_ca, field="public_tls_cert"
        )
