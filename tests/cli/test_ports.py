"""Ports for workers are different, free, and none the system would hand to somebody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from batonlm.cli.ports import HOST, LOWEST, free_ports, free_row


def test_they_are_different_and_free() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    held = [socket.create_server((HOST, port)) for port in ports]
    for one in held:
        one.close()


def test_what_one_process_was_given_no_other_gets() -> None:
    """The others' choice is made as narrow as can be: all but one of the ports are left out."""
    (port,) = free_ports(1)
    ask = (
        "from batonlm.cli.ports import LOWEST, free_ports\n"
        f"print(free_ports(1, avoid=set(range(LOWEST, 65536)) - {{{port}}}))"
    )
    assert subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "[]"


def test_all_of_a_row_are_given() -> None:
    first = free_row(3)
    others = set(range(LOWEST, 65536)) - set(range(first, first + 3))
    assert free_ports(1, avoid=others) == []


def test_the_system_hands_out_none_of_them() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= port <= last for port in free_ports(50))
    assert not any(first - 3 <= port <= last for port in (free_row(4) for _ in range(20)))
