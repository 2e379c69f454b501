"""The address of a router, the CA to trust and the key to send, for commands that call a router."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batonlm.cli import state
from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import split
from batonlm.rpc.peers import PEER_TOKEN_VARIABLE, Metadata, api_key_metadata, check_api_key

if TYPE_CHECKING:
    import grpc

KEY_VARIABLE = "BATON_API_KEY"


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a router."""

    address: str
    ca: bytes | None = None
    """PEM of the CA to trust; empty: gRPC's own list; None: plain text."""
    key: str = ""
    """An API key, or empty."""

    def channel(self) -> grpc.Channel:
        from batonlm.rpc.channels import open_blocking_channel

        return open_blocking_channel(self.address, self.ca)

    @property
    def metadata(self) -> Metadata:
        """Metadata to send with every call."""
        return api_key_metadata(self.key)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ca", metavar="FILE", type=Path,
        help="PEM file: speak TLS, and trust this CA (default: that of `baton up`)",
    )  # fmt: skip
    parser.add_argument("--tls", action="store_true", help="speak TLS, and trust public CAs")
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get(KEY_VARIABLE, ""),
        help=f"default: ${KEY_VARIABLE}, which other users of this machine cannot see",
    )  # fmt: skip


def peer_token(addresses: Iterable[str]) -> str:
    """Returns the token to send to workers at these addresses: the environment's token, else that
    of the running `baton up` if all of them belong to it, else ""."""
    if given := os.environ.get(PEER_TOKEN_VARIABLE, ""):
        return given
    running = state.read() or {}
    own = {process["grpc"] for process in running.get("processes", ())}
    return str(running.get("token", "")) if own.issuperset(addresses) else ""


def access_of(args: argparse.Namespace, default: str, face: str = "grpc") -> Access:
    """Returns the access to the router in the arguments, else to that of the running `baton up`,
    else to `default`.

    face: grpc or http, which selects the address and the flag that sets it.

    Raises InvalidArgument for an unreadable CA, and for a key that would be sent to another machine
    in plain text.
    """
    running = state.read() or {}
    here = str(running.get(face, default)).rpartition("/")[2]
    address = getattr(args, face) or here
    ca: bytes | None = b"" if args.tls else None
    file = args.ca
    if file is None and ca is None and address == here and running.get("ca"):
        file = Path(running["ca"])
    if file is not None:
        try:
            ca = file.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"{file}: {error.strerror}", field="ca") from None
        if not ca:
            raise InvalidArgument(f"{file} is empty", field="ca")
    if address:
        check_api_key(args.api_key, split(address, face)[0], tls=ca is not None)
    return Access(address, ca, args.api_key)
