"""The options of every worker that serves a model over gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgument
from baton.rpc.address import is_loopback, split
from baton.rpc.config import option
from baton.rpc.process_options import ProcessOptions

if TYPE_CHECKING:
    from baton.rpc.probes import Probes


@dataclass(frozen=True, slots=True)
class ServingOptions(ProcessOptions):
    """How a worker is reached, what it serves and how it leaves."""

    listen: str = option("127.0.0.1:0", "where gRPC listens; port 0: a free one", unit="host:port")
    advertise: str = option("", "address for peers; empty: where it listens", unit="host:port")
    metrics_listen: str = option("", "where /metrics is served; empty: nowhere", unit="host:port")
    health_listen: str = option(
        "", "where health alone answers, in plain text; empty: nowhere", unit="host:port"
    )
    model: str = option("", "folder of the model", required=True)
    model_name: str = option("", "name clients use; empty: the folder's name")
    reflection: bool = option(True, "serve gRPC reflection")
    drain_timeout_s: float = option(20.0, "longest time to end on SIGTERM", unit="s", minimum=0.0)
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, "log JSON lines")

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a port that strangers could use by oversight."""
        ProcessOptions.__post_init__(self)
        host, _ = split(self.listen, "listen")
        if not (self.tls_cert or self.allow_anonymous or is_loopback(host)):
            raise InvalidArgument(
                f"{host} is reached from other machines and would ask nobody who they are: give "
                "--tls-cert, --tls-key and --tls-ca, listen on 127.0.0.1, or say --allow-anonymous "
                "if only Baton's own processes reach it",
                field="listen",
            )

    def probes(self) -> Probes:
        """Not opened yet."""
        # Options are also read by commands that load no gRPC.
        from baton.rpc.probes import Probes

        return Probes(health_listen=self.health_listen, metrics_listen=self.metrics_listen)
