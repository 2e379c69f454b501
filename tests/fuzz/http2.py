"""HTTP/2 frames as bytes (RFC 9113), well formed or not, and peers that send them by the thousand.

Headers are written without compression (RFC 7541, literals that are not indexed).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)
END_STREAM, END_HEADERS = 1, 4

HEARD_S = 2.0
"""How long an attacker waits for an answer that may never come, before it leaves."""

CONNECTED_S = 120.0
"""A bound for liveness: the port itself must take connections, however busy it is."""

CHUNK = 1 << 16


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int = -1) -> bytes:
    """length: what the frame says of itself; -1: the truth."""
    said = len(payload) if length < 0 else length
    return said.to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + _string(name) + _string(value)


def call_headers(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    fields = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    )
    return b"".join(header(name, value) for name, value in fields)


def opening() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0)


def send_all(address: tuple[str, int], data: bytes) -> bytes:
    """Sends while the peer takes it, reads while it answers, and leaves. Returns what was read."""
    heard = bytearray()
    with socket.create_connection(address, timeout=CONNECTED_S) as peer:
        peer.settimeout(HEARD_S)
        try:
            for at in range(0, len(data), CHUNK):
                peer.sendall(data[at : at + CHUNK])
                _drain(peer, heard)
            peer.shutdown(socket.SHUT_WR)
            while part := peer.recv(CHUNK):
                heard += part
        except OSError:
            # It has had enough of us, or says nothing.
            pass
    return bytes(heard)


@dataclass(frozen=True)
class Attack:
    name: str
    data: bytes


def attacks(path: bytes) -> Iterator[Attack]:
    """path: an RPC that the address serves."""
    head = call_headers(path)
    call = frame(HEADERS, END_HEADERS, 1, head)
    body = frame(DATA, END_STREAM, 1, b"\0\0\0\0\0")
    for preface in (b"", b"PRI * HTTP/1.1\r\n\r\n", PREFACE[:9], b"\x16\x03\x01" + bytes(60)):
        yield Attack(f"preface {preface[:8]!r}", preface + call + body)
    bad = {
        "a frame longer than any may be": frame(DATA, 0, 1, bytes(100), length=2**24 - 1),
        "a frame of 4 MiB": frame(DATA, 0, 1, bytes(1 << 22)),
        "data on stream 0": frame(DATA, 0, 0, b"x"),
        "data on a stream that is not open": frame(DATA, 0, 7, b"x"),
        "an even stream": frame(HEADERS, END_HEADERS, 2, head),
        "the same stream twice": call + body + call + body,
        "a stream id going down": frame(HEADERS, END_HEADERS, 9, head) + call,
        "headers that are no HPACK": frame(HEADERS, END_HEADERS, 1, b"\xff" * 40),
        "headers that never end": frame(HEADERS, 0, 1, head)
        + frame(CONTINUATION, 0, 1, header(b"x", b"y" * 1000)) * 2000,
        "a header of 1 MiB": frame(HEADERS, END_HEADERS, 1, head + header(b"x", b"y" * (1 << 20))),
        "20 000 headers": frame(HEADERS, 0, 1, head)
        + frame(CONTINUATION, END_HEADERS, 1, header(b"x", b"y") * 2000) * 10,
        "an HPACK bomb": frame(
            HEADERS,
            END_HEADERS,
            1,
            head + b"\x40" + _string(b"x") + _string(b"y" * 3900) + b"\xbe" * 9000,
        ),
        "continuation of nothing": frame(CONTINUATION, END_HEADERS, 1, head),
        "a push": frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2) + head),
        "no path": frame(HEADERS, END_HEADERS | END_STREAM, 1, header(b":method", b"POST")),
        "headers out of order": frame(HEADERS, END_HEADERS, 1, header(b"x", b"y") + head),
        "upper case": frame(HEADERS, END_HEADERS, 1, head + header(b"UPPER", b"y")),
        "GET": frame(HEADERS, END_HEADERS | END_STREAM, 1, head.replace(b"\x04POST", b"\x03GET")),
        "another content type": frame(
            HEADERS, END_HEADERS, 1, head.replace(b"\x10application/grpc", b"\x10application/json")
        )
        + body,
        "an unknown encoding": frame(
            HEADERS, END_HEADERS, 1, head + header(b"grpc-encoding", b"secret")
        )
        + frame(DATA, END_STREAM, 1, b"\1\0\0\0\4abcd"),
        "a bad timeout": frame(HEADERS, END_HEADERS, 1, head + header(b"grpc-timeout", b"9" * 40))
        + body,
        "a message that says 4 GiB": call + frame(DATA, END_STREAM, 1, b"\0\xff\xff\xff\xff"),
        "a message cut short": call + frame(DATA, END_STREAM, 1, b"\0\0\0\0\x10abc"),
        "a flag that is none": call + frame(DATA, END_STREAM, 1, b"\x7f\0\0\0\1x"),
        "a window that overflows": call + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff") * 3,
        "a window of nothing": frame(WINDOW_UPDATE, 0, 0, bytes(4)),
        "settings of odd length": frame(SETTINGS, 0, 0, b"12345"),
        "settings that cannot be": frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
        "an unknown frame": frame(0xFA, 0xFF, 1, b"x" * 99) + call + body,
        "a priority of itself": frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 9)),
        "a farewell, then more": frame(GOAWAY, 0, 0, bytes(8)) + call + body,
        "padding beyond the frame": frame(DATA, 8, 1, b"\xff"),
    }
    for name, frames in bad.items():
        yield Attack(name, opening() + frames)


def floods(path: bytes, count: int) -> Iterator[Attack]:
    """The same harmless thing over and over; count: how often."""
    head = call_headers(path)
    streams = range(1, 2 * count, 2)
    rapid = b"".join(
        frame(HEADERS, END_HEADERS, stream, head) + frame(RST_STREAM, 0, stream, bytes(4))
        for stream in streams
    )
    yield Attack("rapid reset", opening() + rapid)
    opened = b"".join(frame(HEADERS, END_HEADERS, stream, head) for stream in streams)
    yield Attack("streams left open", opening() + opened)
    yield Attack("pings", opening() + frame(PING, 0, 0, bytes(8)) * count)
    yield Attack("settings", opening() + frame(SETTINGS, 0, 0) * count)
    changed = struct.pack(">HI", 4, 1) + struct.pack(">HI", 1, 0)
    yield Attack("settings that change", opening() + frame(SETTINGS, 0, 0, changed) * count)
    yield Attack(
        "empty data", opening() + frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, 0, 1) * count
    )
    yield Attack("window updates", opening() + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * count)


def _drain(peer: socket.socket, heard: bytearray) -> None:
    """Reads what is there, so that a peer which answers is not blocked by us."""
    peer.setblocking(False)
    try:
        while part := peer.recv(CHUNK):
            heard += part
    except OSError:
        pass
    finally:
        peer.settimeout(HEARD_S)


def _string(text: bytes) -> bytes:
    """A length with a prefix of seven bits, then the bytes."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, out = len(text) - 127, bytearray([127])
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest]) + text


def mixed(pieces: Sequence[bytes]) -> bytes:
    return opening() + b"".join(pieces)
