"""The options of all five processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.core.errors import InvalidArgument
from baton.rpc.config import option
from baton.rpc.tls_options import TlsOptions

if TYPE_CHECKING:
    from baton.rpc.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ProcessOptions(TlsOptions):
    """TLS inside, and where traces go."""

    otlp_endpoint: str = option(
        "",
        "where traces go, over OTLP's gRPC (baton[otel]); empty: there are none",
        unit="http[s]://host:port",
    )
    trace_sample_share: float = option(
        1.0,
        "share of requests that are traced, of those whose caller did not decide it",
        minimum=0.0,
        maximum=1.0,
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what cannot be an endpoint."""
        TlsOptions.__post_init__(self)
        if self.otlp_endpoint and not _is_endpoint(self.otlp_endpoint):
            raise InvalidArgument(
                "must be http://host:port, or https://host:port with TLS", field="otlp_endpoint"
            )

    def tracer(self, role: str, instance_id: str) -> Tracer:
        """Its owner closes it. Raises InvalidArgument where what it needs is not installed."""
        # Options are also read by commands that trace nothing.
        from baton.rpc.tracing import OFF

        if not self.otlp_endpoint:
            return OFF
        try:
            from baton.rpc.otel import otlp_tracer
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "opentelemetry":
                raise
            raise InvalidArgument(
                "needs OpenTelemetry: pip install 'baton[otel]'", field="otlp_endpoint"
            ) from None
        return otlp_tracer(self.otlp_endpoint, self.trace_sample_share, role, instance_id)


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port is not None
    except ValueError:
        return False
