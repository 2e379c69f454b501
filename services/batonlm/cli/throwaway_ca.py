"""A CA for one `baton up --tls`, and a certificate for each role.

The CA's key is never written to disk, so no further certificates can be issued.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batonlm.core.errors import InvalidArgument, install
from batonlm.rpc.peers import ROLES, server_name

VALID_DAYS = 30
PUBLIC = "public"
_HOSTS = ("localhost",)
_ADDRESSES = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ThrowawayCa:
    """The files of one CA. Those of a role, or of PUBLIC, are NAME.pem and NAME.key."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def cert(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def flags(self, role: str) -> tuple[str, ...]:
        """Returns the flags with which a process of this role uses it."""
        inside = ("--tls-cert", self.cert(role), "--tls-key", self.key(role), "--tls-ca", self.ca)
        public = ("--public-tls-cert", self.cert(PUBLIC), "--public-tls-key", self.key(PUBLIC))
        return tuple(map(str, inside + (public if role == "router" else ())))


def make(parent: Path) -> ThrowawayCa:
    """Writes a new CA and all certificates into a new folder.

    Raises InvalidArgument without the `cryptography` package.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InvalidArgument(
            f"needs the cryptography package: {install('tls')}", field="tls"
        ) from None

    now = datetime.datetime.now(datetime.UTC)

    def certificate(
        name: str, key: Any, signer: Any, issuer: str, *, ca: bool, names: list[Any]
    ) -> Any:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(x509, name))
            .issuer_name(_named(x509, issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
            )
            .add_extension(_usage(x509, ca=ca), True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(signer, hashes.SHA256())

    parent.mkdir(parents=True, exist_ok=True)
    made = ThrowawayCa(Path(tempfile.mkdtemp(prefix="tls-", dir=parent)))
    ca_name = "Baton, thrown away"
    ca_key = ec.generate_private_key(ec.SECP256R1())
    _write(made.ca, _pem(certificate(ca_name, ca_key, ca_key, ca_name, ca=True, names=[])))
    for name in (*sorted(ROLES), PUBLIC):
        if name == PUBLIC:
            names: list[Any] = [x509.DNSName(host) for host in _HOSTS]
            names += [x509.IPAddress(ipaddress.ip_address(host)) for host in _ADDRESSES]
        else:
            names = [x509.DNSName(server_name(name))]
        key = ec.generate_private_key(ec.SECP256R1())
        signed = certificate(f"baton {name}", key, ca_key, ca_name, ca=False, names=names)
        _write(made.cert(name), _pem(signed))
        _write(made.key(name), _private(key))
    return made


def _usage(x509: Any, *, ca: bool) -> Any:
    """Python 3.13 rejects a CA without this extension."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "crl_sign", "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, **never)


def _named(x509: Any, name: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _private(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    unencrypted = form.NoEncryption()
    return bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, unencrypted))


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is readable by its owner only, from the first moment."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
