"""Options that several processes share: TLS inside Baton, traces, and how a worker is served."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from batonlm.core.errors import InvalidArgument, install
from batonlm.rpc.address import is_loopback, split
from batonlm.rpc.config import option

if TYPE_CHECKING:
    from typing import Self

    from batonlm.rpc.server import Probes
    from batonlm.rpc.tls import Certificates
    from batonlm.rpc.tracing import Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS and token between Baton's processes. Either all processes use TLS, or none.

    Files may be replaced at any time: connections made afterwards use the new ones.
    """

    tls_cert: str = option(
        "", "PEM file: this process's certificate and what is between it and the CA", unit="file"
    )
    tls_key: str = option("", "PEM file: the certificate's key", unit="file")
    tls_ca: str = option("", "PEM file: the CA of all of Baton's processes", unit="file")
    peer_token: str = option(
        "",
        "secret that Baton's processes show each other, all the same one; empty: none. Set it in "
        "the environment: all users of a machine can read command lines",
        secret=True,
    )
    allow_anonymous: bool = option(
        False, "let callers in from other machines that nobody can tell who they are"
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an incomplete set of files, and for a token that cannot be
        sent as metadata."""
        needs_all(self, ("tls_cert", "tls_key", "tls_ca"))
        if not all("!" <= letter <= "~" for letter in self.peer_token):
            raise InvalidArgument("must be printable ASCII without blanks", field="peer_token")

    def certificates(self) -> Certificates | None:
        """The certificates; None without TLS. Raises InvalidArgument when the files cannot be
        used."""
        if not self.tls_cert:
            return None
        # Imported late, because reading options, as `baton --help` does, needs no gRPC.
        from batonlm.rpc.tls import Certificates

        return Certificates(self.tls_cert, self.tls_key, self.tls_ca)


def needs_all(options: object, names: tuple[str, ...]) -> None:
    """Raises InvalidArgument naming the first missing option while another one is given."""
    missing = [name for name in names if not getattr(options, name)]
    if missing and len(missing) < len(names):
        given = next(name for name in names if name not in missing)
        raise InvalidArgument(f"is required with {given}", field=missing[0])


@dataclass(frozen=True, slots=True)
class ProcessOptions(TlsOptions):
    """TLS between Baton's processes, and the export of traces."""

    otlp_endpoint: str = option(
        "",
        "where traces go, over OTLP's gRPC (batonlm[otel]); empty: there are none",
        unit="http[s]://host:port",
    )
    trace_sample_share: float = option(
        1.0,
        "share of requests that are traced, of those whose caller did not decide it",
        minimum=0.0,
        maximum=1.0,
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a malformed endpoint."""
        TlsOptions.__post_init__(self)
        if self.otlp_endpoint and not _is_endpoint(self.otlp_endpoint):
            raise InvalidArgument(
                "must be http://host:port, or https://host:port with TLS", field="otlp_endpoint"
            )

    def tracer(self, role: str, instance_id: str) -> Tracer:
        """The process's tracer, which the caller closes. Raises InvalidArgument when OpenTelemetry
        is not installed."""
        # Imported late, because commands that trace nothing read options too.
        from batonlm.rpc.tracing import OFF

        if not self.otlp_endpoint:
            return OFF
        try:
            from batonlm.rpc.otel import otlp_tracer
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "opentelemetry":
                raise
            raise InvalidArgument(
                f"needs OpenTelemetry: {install('otel')}", field="otlp_endpoint"
            ) from None
        return otlp_tracer(self.otlp_endpoint, self.trace_sample_share, role, instance_id)


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port is not None
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServingOptions(ProcessOptions):
    """How a worker is reached, what it serves and how it leaves."""

    REMOVED: ClassVar = frozenset(("reflection",))

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    health_listen: str = option(
        "", "where health alone answers, in plain text; empty: nowhere", unit="host:port"
    )
    model: str = option(
        "", "folder of the model, or s3://bucket/name@version in an object store", required=True
    )
    model_name: str = option("", "name clients use; empty: the folder's name")
    model_cache: str = option(
        "", "folder in which models of object stores are kept, shared by all processes of a node; "
        "empty: the user's cache folder", unit="folder",
    )  # fmt: skip
    model_cache_gib: int = option(
        0,
        "most that this folder holds: the least recently used models make room; 0: no bound",
        unit="GiB",
        minimum=0,
    )
    drain_timeout_s: float = option(20.0, "longest time to end on SIGTERM", unit="s", minimum=0.0)
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        """Raises InvalidArgument for an open port without TLS, unless it is allowed explicitly."""
        ProcessOptions.__post_init__(self)
        host, _ = split(self.listen, "listen")
        if not (self.tls_cert or self.allow_anonymous or is_loopback(host)):
            raise InvalidArgument(
                f"{host} is reached from other machines and would ask nobody who they are: give "
                "--tls-cert, --tls-key and --tls-ca, listen on 127.0.0.1, or say --allow-anonymous "
                "if only Baton's own processes reach it",
                field="listen",
            )

    def with_model(self, ends: ExitStack, *, weights: bool = True) -> Self:
        """Returns these options with a model that is in a folder here, fetched if necessary; nobody
        removes it until `ends`. Blocks. Raises BatonError, also for a model that is not as it was
        fetched."""
        from batonlm.registry import cache
        from batonlm.registry.sources import in_object_store

        if not in_object_store(self.model):
            ends.enter_context(cache.in_use(Path(self.model)))
            return self
        from batonlm.registry.object_store import object_source

        source = object_source(self.model)
        folder = cache.opened(
            source,
            self.cache_folder,
            lambda text: log.info("%s: %s", source.name, text),
            ends,
            weights=weights,
            most_bytes=self.model_cache_gib << 30,
        )
        return replace(self, model=str(folder), model_name=self.model_name or source.served_name)

    @property
    def cache_folder(self) -> Path:
        from batonlm.registry.cache import default_cache

        return Path(self.model_cache).expanduser() if self.model_cache else default_cache()

    def probes(self) -> Probes:
        """The process's Probes, not opened yet."""
        # Imported late, because commands that load no gRPC read options too.
        from batonlm.rpc.server import Probes

        return Probes(health_listen=self.health_listen, metrics_listen=self.metrics_listen)
