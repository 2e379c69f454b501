"""A CA for tests, and certificates of roles as files that can be replaced."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

from batonlm.rpc.peers import server_name
from batonlm.rpc.tls import Certificates


@dataclass(frozen=True)
class Files:
    """What one process is given."""

    cert: Path
    key: Path
    ca: Path

    def certificates(self) -> Certificates:
        return Certificates(str(self.cert), str(self.key), str(self.ca))

    @property
    def flags(self) -> tuple[str, ...]:
        named = (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca))
        return tuple(word for flag, path in named for word in (flag, str(path)))


class Authority:
    """One CA, whose files go into one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)

    def role(self, role: str, *, expired: bool = False, ca: Authority | None = None) -> Files:
        """ca: whom the process trusts, if not this one."""
        return self.host(role, server_name(role), expired=expired, ca=ca)

    def host(
        self, name: str, *hosts: str, expired: bool = False, ca: Authority | None = None
    ) -> Files:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        files = Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
        leaf = self._ca.issue_cert(
            *hosts,
            not_before=datetime(2000, 1, 1),
            not_after=datetime(2001, 1, 1) if expired else None,
            key_type=trustme.KeyType.ECDSA,
        )
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        _replace(files.key, leaf.private_key_pem.bytes())
        _replace(files.cert, chain)
        _replace(files.ca, (ca or self)._ca.cert_pem.bytes())
        return files


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    os.replace(fresh, path)
