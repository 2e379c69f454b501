"""The options of every process for how Baton's processes know each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgument
from baton.rpc.config import option

if TYPE_CHECKING:
    from baton.rpc.tls import Certificates


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """What this process shows others of Baton, and whom it trusts. All processes have it or none.

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
        """Raises InvalidArgument for a set with something missing, and for a token that cannot be
        sent."""
        needs_all(self, ("tls_cert", "tls_key", "tls_ca"))
        if not all("!" <= letter <= "~" for letter in self.peer_token):
            raise InvalidArgument("must be printable ASCII without blanks", field="peer_token")

    def certificates(self) -> Certificates | None:
        """None: no TLS inside. Raises InvalidArgument when the files cannot be used."""
        if not self.tls_cert:
            return None
        # Reading options alone, as `baton --help` does, takes no gRPC.
        from baton.rpc.tls import Certificates

        return Certificates(self.tls_cert, self.tls_key, self.tls_ca)


def needs_all(options: object, names: tuple[str, ...]) -> None:
    """Raises InvalidArgument naming the first that is missing while another one is given."""
    missing = [name for name in names if not getattr(options, name)]
    if missing and len(missing) < len(names):
        given = next(name for name in names if name not in missing)
        raise InvalidArgument(f"is required with {given}", field=missing[0])
