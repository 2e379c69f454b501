"""`baton doctor kv`: runs the probe or the listener with the right settings and shows findings.

The probe runs in its own process with a deadline, so that this command ends and reports the stage
reached, whatever UCX or the peer does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from batonlm.cli.access import peer_token
from batonlm.cli.checks import Finding, document, fail, failed, show
from batonlm.cli.kv import fabric, verdicts
from batonlm.core.errors import InvalidArgument
from batonlm.rpc.address import split
from batonlm.rpc.peers import DOCTOR, PEER_TOKEN_VARIABLE

DEADLINE_S = 60.0
CONNECT_S = 3.0
NETWORKS = ("auto", "local", "isolated", "trusted")
TRANSPORTS = ("auto", "nixl", "loopback")


def add_parser(subparsers: Any) -> None:
    """Options that workers also have default to their BATON_ variables, as in a container."""
    parser = subparsers.add_parser(
        "kv", help="move KV chunks between two machines and say how it went"
    )
    ends = parser.add_mutually_exclusive_group(required=True)
    ends.add_argument(
        "--peer", metavar="HOST:PORT", help="a prefill or decode worker, or a listening doctor"
    )
    ends.add_argument("--listen", metavar="HOST:PORT", help="be the peer of a doctor elsewhere")
    parser.add_argument(
        "--kv-network", default=os.environ.get("BATON_KV_NETWORK", "auto"), metavar="NAME",
        help="what KV moves on, as a worker's --kv-network (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", default=os.environ.get("BATON_TRANSPORT", "auto"), metavar="NAME",
        help="as a worker's --transport (default %(default)s)",
    )  # fmt: skip
    for name in ("ucx-transports", "ucx-devices"):
        parser.add_argument(
            f"--{name}", default=os.environ.get(f"BATON_{name.upper().replace('-', '_')}", ""),
            metavar="LIST", help=f"as a worker's --{name}, comma separated",
        )  # fmt: skip
    for name in ("tls-cert", "tls-key", "tls-ca"):
        parser.add_argument(
            f"--{name}", default=os.environ.get(f"BATON_{name.upper().replace('-', '_')}", ""),
            metavar="FILE", help=f"as a worker's --{name}; the certificate is a doctor's",
        )  # fmt: skip
    parser.add_argument(
        "--peer-role", choices=("prefill", "decode", DOCTOR), default="prefill",
        help="what the peer's certificate must say, with TLS (default %(default)s)",
    )  # fmt: skip
    # The parent parser also has --json; a default here would override it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a check failed, else 0. Raises InvalidArgument with the option's name."""
    from batonlm.rpc.options import TlsOptions
    from batonlm.transfer.ucx import Ucx, choose, inherited
    from batonlm.worker.process import network_of

    for field, allowed in (("kv_network", NETWORKS), ("transport", TRANSPORTS)):
        if getattr(args, field) not in allowed:
            raise InvalidArgument(f"must be one of {', '.join(allowed)}", field=field)
    host, _ = split(args.listen or args.peer, "listen" if args.listen else "peer")
    ucx = Ucx()
    if args.transport != "loopback":
        ucx = choose(
            network_of(args.kv_network, [host]),
            transports=_listed(args.ucx_transports),
            devices=_listed(args.ucx_devices),
            inherited=inherited(),
        )
    tls = TlsOptions(tls_cert=args.tls_cert, tls_key=args.tls_key, tls_ca=args.tls_ca)
    if args.listen:
        from batonlm.cli.kv.listen import listen

        certificates = tls.certificates()
        token = os.environ.get(PEER_TOKEN_VARIABLE, "")
        return asyncio.run(listen(args.listen, args.transport, ucx, args.json, certificates, token))
    task = {
        "peer": args.peer,
        "kv_network": ucx.network.value,
        "transport": args.transport,
        "ucx_transports": _listed(args.ucx_transports),
        "ucx_devices": ucx.devices,
        "peer_role": args.peer_role,
        "tls": (args.tls_cert, args.tls_key, args.tls_ca) if args.tls_cert else (),
    }
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as folder:
        log = Path(folder) / "ucx.log"
        facts, stuck = _probe(task, log)
        way = fabric.way_of_reads(log)
    if "peer" not in facts:
        facts["accepts"] = _accepts(args.peer)
    devices = ucx.devices or _listed(os.environ.get("UCX_NET_DEVICES", ""))
    named = [device for device in devices if device != "all"]
    found = verdicts.judge(args.peer, facts, way, fabric.look(), named)
    if stuck is not None:
        found["probe"] = stuck
    if args.json:
        figures = {**facts, "way": asdict(way) if way is not None else None}
        print(json.dumps(document(found) | {"kv": figures}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for name, finding in found.items():
            show(console, name, finding)
    return int(failed(found))


def _probe(task: dict[str, Any], log: Path) -> tuple[dict[str, Any], Finding | None]:
    """Returns the facts that the probe printed, and a finding if it did not end normally."""
    command = [sys.executable, "-m", "batonlm.cli.kv.probe", json.dumps(task)]
    environment = {
        **os.environ,
        **fabric.environment(log),
        "BATON_PARENT_PID": str(os.getpid()),
        PEER_TOKEN_VARIABLE: peer_token([task["peer"]]),
    }
    stuck = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            output, errors = child.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
            stuck = fail(
                f"did not end within {DEADLINE_S:.0f} s",
                "the peer or the network froze; see the peer's log",
            )
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        # UCX may also write to standard output.
        if line.startswith("{"):
            facts.update(json.loads(line))
    if stuck is None and not facts.keys() & {"done", "error"}:
        words = errors.strip().splitlines()[-1:] or ["no word"]
        stuck = fail(
            f"ended with code {child.returncode}: {words[0][:200]}",
            "UCX may not work on this machine: run 'baton doctor'",
        )
    return facts, stuck


def _accepts(address: str) -> bool:
    """Returns whether the address accepts connections."""
    try:
        with socket.create_connection(split(address, "peer"), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
