"""One process's certificate, key and CA, as they are on disk now.

Replaced files are used without a restart: `current` is called for each connection and looks at the
files, at most once a second. New files that cannot be used leave the old ones in place; the log and
a gauge show it. No task is needed for that.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.core.errors import InvalidArgument
from baton.rpc.metrics import TLS_STALE, gauge

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    """What was read at one time. ca: empty when nobody has to show a certificate."""

    cert: bytes
    key: bytes
    ca: bytes


class Certificates:
    """Used from any thread, because gRPC's own ask it at every handshake."""

    def __init__(self, cert: str, key: str, ca: str = "", *, field: str = "tls_cert") -> None:
        """Reads all files. ca: empty asks no peer for a certificate.

        Raises InvalidArgument naming `field` when they cannot be used.
        """
        self.cert, self.key = Path(cert), Path(key)
        self.ca = Path(ca) if ca else None
        """None: no peer has to show a certificate."""
        self._paths = [path for path in (self.cert, self.key, self.ca) if path is not None]
        self._lock = threading.Lock()
        self._stale = False
        self._seen = signature(self._paths)
        self._looked = time.monotonic()
        try:
            self._pems = self._read()
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"cannot be used: {_why(error)}", field=field) from None
        gauge(TLS_STALE, lambda: {(): float(self._stale)})

    def current(self) -> Pems:
        """The same object until the files change."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= LOOK_S:
                self._looked = now
                found = signature(self._paths)
                if found != self._seen:
                    self._renew(found)
                else:
                    self._stale = False
            return self._pems

    def server_credentials(self) -> grpc.ServerCredentials:
        """For one gRPC server, whose handshakes take over what is current."""
        given = self.current()
        lock = threading.Lock()

        # The stubs do not know that None, for no change, may be returned.
        def fetch() -> Any:
            nonlocal given
            pems = self.current()
            with lock:
                if pems is given:
                    return None
                given = pems
            return _configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given), fetch, require_client_authentication=bool(given.ca)
        )

    def _renew(self, found: Signature) -> None:
        try:
            pems = self._read()
        except (OSError, ValueError) as error:
            if not self._stale:
                log.error("new certificate files cannot be used: %s", _why(error))
            self._stale = True
            # Not seen yet, so it is tried again: files are often replaced one by one.
            return
        if signature(self._paths) == found:
            self._pems, self._seen, self._stale = pems, found, False
            log.info("took over new certificate files")

    def _read(self) -> Pems:
        """Raises OSError, and ValueError for what is no certificate, or one of another key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A key with a passphrase would else be asked for on the terminal.
        context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        ca = self.ca.read_bytes() if self.ca else b""
        if ca:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        elif self.ca:
            raise ValueError("the CA's file is empty")
        return Pems(self.cert.read_bytes(), self.key.read_bytes(), ca)


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """For a peer that has to show a certificate of this CA, and to whom ours is shown."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca or None)


def _why(error: Exception) -> str:
    """In words that hold no key material."""
    match error:
        case ssl.SSLError():
            reason = error.reason or "not PEM"
            return f"certificate, key and CA do not fit together or are not PEM ({reason})"
        case OSError():
            return f"{error.filename or 'a file'}: {error.strerror or 'cannot be read'}"
        case UnicodeDecodeError():
            return "the CA's file is not PEM"
    return str(error)


LOOK_S = 1.0
"""How long a change may go unnoticed."""

Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """Differs when any of the files was written, replaced, or put behind another symbolic link.

    Links are followed, also those of folders: Kubernetes replaces a mounted Secret by turning the
    link of a folder. A file that cannot be looked at counts as absent.
    """
    return tuple(map(_of, paths))


def _of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
