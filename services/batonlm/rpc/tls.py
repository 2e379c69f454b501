"""One process's certificate, key and CA, reloaded from disk when the files change.

`current` is called for each connection and checks the files at most once a second, so that replaced
files take effect without a restart or a background task. When new files cannot be used, the old
contents stay in use, and the log and a gauge report it.
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

from batonlm.core.errors import InvalidArgument
from batonlm.rpc.metrics import TLS_STALE, gauge

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files, read together."""

    cert: bytes
    key: bytes
    ca: bytes
    """Empty when no certificate is required of peers."""


class Certificates:
    """Thread-safe: gRPC's own threads call it at every handshake."""

    def __init__(self, cert: str, key: str, ca: str = "", *, field: str = "tls_cert") -> None:
        """Reads all files. ca: empty requires no certificate of peers.

        Raises InvalidArgument naming `field` when they cannot be used.
        """
        self.cert, self.key = Path(cert), Path(key)
        self.ca = Path(ca) if ca else None
        """None: no certificate is required of peers."""
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
        """The current contents; the same object until the files change."""
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
        """Credentials for one gRPC server; each handshake uses the current files."""
        given = self.current()
        lock = threading.Lock()

        # Any: the type stubs miss that None is allowed and means no change.
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
            # `_seen` stays, so that it is tried again: files are often replaced one by one.
            return
        if signature(self._paths) == found:
            self._pems, self._seen, self._stale = pems, found, False
            log.info("took over new certificate files")

    def _read(self) -> Pems:
        """Raises OSError, or ValueError for an invalid certificate or one of another key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Otherwise OpenSSL would prompt for a key's passphrase on the terminal.
        context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        ca = self.ca.read_bytes() if self.ca else b""
        if ca:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        elif self.ca:
            raise ValueError("the CA's file is empty")
        return Pems(self.cert.read_bytes(), self.key.read_bytes(), ca)


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """Mutual TLS: the peer must present a certificate of this CA, and receives this process's."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca or None)


def _why(error: Exception) -> str:
    """The reason of an error, in words that hold no key material."""
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
"""The shortest interval between two checks of the files."""

Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """A value that changes when a file is written, replaced, or reached over another symbolic link.

    Links are followed, also those of folders: Kubernetes replaces a mounted Secret by repointing
    the link of a folder. A file that cannot be read counts as absent.
    """
    return tuple(map(_of, paths))


def _of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
