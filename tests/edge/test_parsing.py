"""What is no plain HTTP/1.1 request: never two answers for one, and nothing smuggled.

Every variant is sent as bytes to a running edge. Within most of them is a whole request of its own,
`INNER`, where a parser that counts wrongly would find it. Each says what may come back. Where
RFC 9112 or RFC 9110 leave no choice, there is none here either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from tests.edge.edge import EdgeProcess
from tests.edge.wire import (
    HEALTH,
    PATH,
    PREFACE,
    Said,
    answers_of,
    chunk,
    completion_of,
    connected,
    exchange,
    head,
    healthy,
    length,
    post,
    prompt,
)

OUTER = prompt("outer")
INNER = post("inner")
LAST = b"0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
Statuses = tuple[int, ...]

ANSWERED = frozenset({(200,)})
BAD = frozenset({(400,)})
BAD_OR_ENDED = frozenset({(400,), ()})
"""What is wrong with a body is found when its request is answered already, or never will be."""
EITHER = frozenset({(200,), (400,)})
NO_SUCH_CODING = frozenset({(400,), (501,)})
"""RFC 9112 6.1 asks for 501."""
NO_SUCH_VERSION = frozenset({(400,), (505,)})
REFUSED = frozenset({(400,), (403,), (404,), (405,), (421,), (501,)})
TOO_LARGE = frozenset({(400,), (413,), (414,), (431,), ()})
"""Whoever sends on against a refusal may find the connection reset in its place."""


@dataclass(frozen=True)
class Variant:
    """segments: sent one by one. permitted: statuses of all final answers on the connection.
    prompts: what may reach the frontend, in this order. wait_for: so many answers have to come; 0
    where the server may wait for more, and then nothing may reach the frontend. ends: the server
    has to end the connection. head_only: answers have no bodies.
    """

    name: str
    segments: tuple[bytes, ...]
    permitted: frozenset[Statuses]
    prompts: tuple[str, ...] = ("outer",)
    wait_for: int = 1
    ends: bool = False
    head_only: bool = False


def sent(
    name: str,
    permitted: frozenset[Statuses],
    *segments: bytes,
    prompts: tuple[str, ...] = ("outer",),
    wait_for: int = 1,
    ends: bool = False,
    head_only: bool = False,
) -> Variant:
    return Variant(name, segments, permitted, prompts, wait_for, ends, head_only)


def lengths() -> Iterator[Variant]:
    """What says how long a body is, said twice or wrongly."""
    both = chunk(OUTER) + LAST + INNER
    two: dict[str, tuple[bytes, ...]] = {
        "te-then-cl": (CHUNKED, length(both)),
        "cl-then-te": (length(both), CHUNKED),
        "short-cl-then-te": (length(b"12345"), CHUNKED),
        "te-then-cl-0": (CHUNKED, length(b"")),
    }
    for name, lines in two.items():
        # RFC 9112 6.1: the connection ends with the answer.
        yield sent(name, EITHER, head(*lines) + both, ends=True)
        yield sent(name + "-later", EITHER, head(*lines), both, ends=True)
    yield sent("cl-twice-equal", EITHER, head(length(OUTER), length(OUTER)) + OUTER)
    yield sent(
        "cl-list-equal", EITHER, head(b"Content-Length: %d, %d" % ((len(OUTER),) * 2)) + OUTER
    )
    longer = length(OUTER + INNER)
    two = {
        "cl-twice-longer": (length(OUTER), longer),
        "cl-twice-shorter": (longer, length(OUTER)),
        "cl-list": (b"Content-Length: %d, %d" % (len(OUTER), len(OUTER + INNER)),),
    }
    for name, lines in two.items():
        yield sent(name, BAD, head(*lines) + OUTER + INNER, ends=True)
    for name, value in {
        "plus": b"+%d" % len(OUTER),
        "minus": b"-%d" % len(OUTER),
        "hex": b"0x%x" % len(OUTER),
        "underscore": b"_".join(b"%c" % digit for digit in b"%d" % len(OUTER)),
        "exponent": b"1e1",
        "fraction": b"%d.0" % len(OUTER),
        "empty": b"",
        "inner-space": b"1 6",
        "vertical-tab": b"\x0b%d" % len(OUTER),
        "letters": b"%dabc" % len(OUTER),
        "arabic-digits": "١٦".encode(),
        "overflow": b"99999999999999999999999",
        "wraps-64-bits": b"%d" % ((1 << 64) + len(OUTER)),
        "wraps-32-bits-twice": b"%d" % ((1 << 96) + len(OUTER)),
    }.items():
        yield sent("cl-" + name, BAD, head(b"Content-Length: " + value) + OUTER + INNER, ends=True)
    yield sent("cl-zeroes", EITHER, head(b"Content-Length: 000%d" % len(OUTER)) + OUTER)
    yield sent("cl-trailing-space", ANSWERED, head(length(OUTER) + b" \t ") + OUTER)
    cut = head(b"Content-Length: %d" % (len(OUTER) + 1)) + OUTER
    yield sent("cl-not-reached", BAD_OR_ENDED, cut, prompts=(), wait_for=0)
    # Nothing of a body that never comes may be kept room for.
    huge = head(b"Content-Length: %d" % ((1 << 63) - 1))
    yield sent("cl-huge", frozenset({(400,), (413,), ()}), huge, wait_for=0, prompts=())


def codings() -> Iterator[Variant]:
    """Transfer-Encoding, and what can be made of it."""
    body = chunk(OUTER) + LAST
    for name, field in {
        "case": b"Transfer-Encoding: cHuNkEd",
        "tab": b"Transfer-Encoding:\tchunked\t",
        "no-space": b"transfer-encoding:chunked",
    }.items():
        yield sent("te-" + name, ANSWERED, head(field) + body)
    for name, value in {
        "xchunked": b"xchunked",
        "chunkedx": b"chunkedx",
        "vertical-tab": b"\x0bchunked",
        "vertical-tab-behind": b"chunked\x0b",
        "no-break-space": b"chunked\xa0",
        "quoted": b'"chunked"',
        "empty": b"",
        "chunked-last-not": b"chunked, identity",
        "chunked-twice": b"chunked, chunked",
        "parameter": b"chunked;q=1",
        "gzip": b"gzip",
    }.items():
        # One server sees a body here, another none; with a length, they disagree where it ends.
        everything = body + INNER
        fields = (b"Transfer-Encoding: " + value, length(everything))
        allowed = NO_SUCH_CODING
        yield sent("te-" + name, allowed, head(fields[0]) + everything, ends=True, prompts=())
        yield sent(f"te-{name}-and-cl", allowed, head(*fields) + everything, ends=True, prompts=())
    # "identity" is no coding any more; whoever passes it over still has one framing.
    for name, fields_ in {
        "identity": (b"Transfer-Encoding: identity, chunked",),
        "two-lines": (b"Transfer-Encoding: identity", CHUNKED),
        "empty-member": (b"Transfer-Encoding: , chunked",),
    }.items():
        yield sent("te-" + name, EITHER | NO_SUCH_CODING, head(*fields_) + body)
    old = b"POST " + PATH + b" HTTP/1.0"
    yield sent("te-in-1.0", EITHER, head(CHUNKED, line=old) + body + INNER, ends=True)
    yield sent(
        "te-in-1.0-kept-alive",
        EITHER,
        head(CHUNKED, b"Connection: keep-alive", line=old) + body + INNER,
        ends=True,
    )


def chunks() -> Iterator[Variant]:
    """Bodies that are chunked wrongly."""
    for name, size in {
        "overflow": b"FFFFFFFFFFFFFFFFF",
        "wraps": b"1%016x" % len(OUTER),
        "minus": b"-%x" % len(OUTER),
        "plus": b"+%x" % len(OUTER),
        "0x": b"0x%x" % len(OUTER),
        "empty": b"",
        "underscore": b"1_0",
        "leading-space": b" %x" % len(OUTER),
        "letters": b"xyz",
        "nul": b"%x\x00" % len(OUTER),
    }.items():
        wrong = size + b"\r\n" + OUTER + b"\r\n" + LAST + INNER
        yield sent(
            "chunk-size-" + name, BAD_OR_ENDED, head(CHUNKED) + wrong, prompts=(), wait_for=0
        )
        yield sent(
            f"chunk-size-{name}-later", BAD_OR_ENDED, head(CHUNKED), wrong, prompts=(), wait_for=0
        )
    size = b"%x" % len(OUTER)
    for name, body in {
        "longer-than-said": b"%x\r\n%b\r\n" % (len(OUTER) - 1, OUTER) + LAST + INNER,
        "no-end-of-data": size + b"\r\n" + OUTER + LAST + INNER,
        "bare-cr": size + b"\r" + OUTER + b"\r" + b"0\r\r" + INNER,
        "bare-cr-in-extension": size + b";a\rb\r\n" + OUTER + b"\r\n" + LAST,
    }.items():
        yield sent("chunk-" + name, BAD_OR_ENDED, head(CHUNKED) + body, prompts=(), wait_for=0)
    # A lenient reader of "\n" answers; none may take the one line for two, or find a request.
    hidden = size + b";\n" + OUTER + b"\r\n" + LAST
    yield sent("chunk-bare-lf", EITHER | {()}, head(CHUNKED) + hidden)
    plain_lf = size + b"\n" + OUTER + b"\n0\n\n"
    yield sent("chunk-only-lf", EITHER | {()}, head(CHUNKED) + plain_lf)
    extended = size + b';a=b;c="d;e"\r\n' + OUTER + b"\r\n" + LAST
    yield sent("chunk-extension", EITHER, head(CHUNKED) + extended)
    spaced = size + b" ;a\r\n" + OUTER + b"\r\n" + LAST
    yield sent("chunk-space-behind", EITHER | {()}, head(CHUNKED) + spaced)
    zeroes = b"0" * 40 + size + b"\r\n" + OUTER + b"\r\n" + LAST
    yield sent("chunk-size-zeroes", EITHER | {()}, head(CHUNKED) + zeroes)
    # RFC 9112 8: without the last chunk a body is incomplete.
    cut = chunk(OUTER)
    yield sent("chunk-no-last", BAD_OR_ENDED, head(CHUNKED) + cut, prompts=(), wait_for=0)
    yield sent("chunk-no-last-later", BAD_OR_ENDED, head(CHUNKED), cut, prompts=(), wait_for=0)
    for name, trailer in {
        "length": length(INNER),
        "coding": CHUNKED,
        "key": b"Authorization: Bearer inner",
        "host": b"Host: other",
    }.items():
        ended = chunk(OUTER) + b"0\r\n" + trailer + b"\r\n\r\n"
        yield sent("trailer-" + name, EITHER | {()}, head(CHUNKED) + ended)
    bad = chunk(OUTER) + b"0\r\n" + b"no colon\r\n\r\n"
    yield sent("trailer-no-colon", EITHER | {()}, head(CHUNKED) + bad)


def fields() -> Iterator[Variant]:
    """Header lines that are none."""
    known = length(OUTER)
    whole = OUTER + INNER
    for name, wrong in {
        "space-before-colon": b"Content-Length : %d" % len(whole),
        "tab-before-colon": b"X-A\t: b",
        "coding-space-before-colon": b"Transfer-Encoding : chunked",
        "no-colon": b"X-Nothing",
        "no-name": b": value",
        "nul-in-name": b"X-\x00A: b",
        "space-in-name": b"X A: b",
        "name-not-ascii": "X-ä: b".encode(),
        "slash-in-name": b"X/A: b",
    }.items():
        yield sent("field-" + name, BAD, head(wrong, known) + whole, ends=True)
    for name, wrong in {
        "nul-in-value": b"X-A: a\x00b",
        "bare-cr-in-value": b"X-A: a\rTransfer-Encoding: chunked",
        "fold": b"X-A: a\r\n b",
        "fold-tab": b"X-A: a\r\n\tb",
    }.items():
        # RFC 9110 5.5 and RFC 9112 5.2: refused, or each such octet is a space.
        yield sent("field-" + name, EITHER, head(wrong, known) + OUTER)
    folded = head(b"Content-Length:\r\n %d" % len(OUTER)) + OUTER
    yield sent("field-folded-length", EITHER, folded)
    both = chunk(OUTER) + LAST + INNER
    yield sent(
        "field-folded-coding",
        EITHER,
        head(b"Transfer-Encoding:\r\n chunked", length(both)) + both,
        ends=True,
    )
    first_folded = head(host=b" Host: localhost") + INNER
    yield sent("field-first-folded", BAD, first_folded, prompts=(), ends=True)
    control = head(b"X-A: a\x01b", known) + OUTER
    yield sent("field-control-in-value", EITHER, control)
    yield sent("field-value-not-ascii", EITHER, head(b"X-A: \xff\xfe", known) + OUTER)
    # A line may end with "\n" alone (RFC 9112 2.2), or be refused for it.
    yield sent("lf-everywhere", EITHER, head(known, end=b"\n") + OUTER)
    one = b"POST " + PATH + b" HTTP/1.1\nHost: localhost\r\n" + known + b"\r\n\r\n"
    yield sent("lf-behind-request-line", EITHER, one + OUTER)
    yield sent("lf-within-field", EITHER, head(b"X-A: a\n" + known) + OUTER)
    yield sent(
        "cr-everywhere", BAD_OR_ENDED, head(known, end=b"\r") + OUTER, prompts=(), wait_for=0
    )
    early = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n" + INNER
    # "\r\n\n" ends a head for whoever takes "\n" for a line's end: then INNER is a second request.
    yield sent(
        "lf-ends-head",
        frozenset({(200, 200), (200,), (400,)}),
        early,
        prompts=("inner",),
        wait_for=2,
    )


def hosts() -> Iterator[Variant]:
    """RFC 9112 3.2: none, two or an invalid one is 400."""
    known = length(OUTER)
    yield sent("host-none", BAD, head(known, host=None) + OUTER, prompts=())
    for name, wrong in {
        "two": b"Host: localhost\r\nHost: localhost",
        "two-different": b"Host: localhost\r\nHost: other",
        "space": b"Host: local host",
        "path": b"Host: localhost/path",
        "user": b"Host: user@localhost",
        "list": b"Host: localhost, other",
        "port": b"Host: localhost:http",
        "not-ascii": b"Host: local\xffhost",
    }.items():
        yield sent("host-" + name, BAD, head(known, host=wrong) + OUTER, prompts=())
    yield sent("host-empty", EITHER | REFUSED, head(known, host=b"Host:") + OUTER)
    old = head(known, host=None, line=b"POST " + PATH + b" HTTP/1.0") + OUTER
    yield sent("host-none-in-1.0", EITHER | REFUSED, old)


def targets() -> Iterator[Variant]:
    """Request lines."""
    known = length(OUTER)

    def line(
        name: str, permitted: frozenset[Statuses], line: bytes, *, prompts: bool = False
    ) -> Variant:
        return sent(name, permitted, head(known, line=line) + OUTER, prompts=("outer",) * prompts)

    # RFC 9112 3.2.2: a server accepts it.
    absolute = b"POST http://localhost" + PATH + b" HTTP/1.1"
    yield line("target-absolute", ANSWERED, absolute, prompts=True)
    yield line(
        "target-absolute-https", EITHER | REFUSED, absolute.replace(b"p:", b"ps:"), prompts=True
    )
    nothing = head(line=b"CONNECT localhost:443 HTTP/1.1")
    yield sent("target-connect", REFUSED, nothing, prompts=())
    # Whatever follows a CONNECT is no request: the client thinks that it is in a tunnel.
    tunnel = (nothing, INNER)
    more = frozenset((*each, 200) for each in REFUSED)
    yield sent("target-connect-then-more", REFUSED | more, *tunnel, prompts=("inner",), wait_for=2)
    asterisk = head(line=b"OPTIONS * HTTP/1.1")
    yield sent("target-asterisk", REFUSED | {(200,), (204,)}, asterisk, prompts=())
    yield line("target-asterisk-of-post", REFUSED, b"POST * HTTP/1.1")
    yield line("target-authority", REFUSED, b"POST localhost:80 HTTP/1.1")
    yield line("target-relative", REFUSED, b"POST v1/completions HTTP/1.1")
    yield line("target-space", BAD, b"POST /v1/comp letions HTTP/1.1")
    yield line("target-two-spaces", EITHER, b"POST  " + PATH + b" HTTP/1.1", prompts=True)
    yield line("target-tab", EITHER, b"POST\t" + PATH + b"\tHTTP/1.1", prompts=True)
    yield line(
        "target-fragment", REFUSED | ANSWERED, b"POST " + PATH + b"#a HTTP/1.1", prompts=True
    )
    yield line("target-nul", BAD, b"POST /v1/\x00 HTTP/1.1")
    yield line("target-not-ascii", REFUSED, "POST /v1/ä HTTP/1.1".encode())
    yield line("target-bad-escape", REFUSED, b"POST /v1/%zz HTTP/1.1")
    yield line("target-empty", BAD, b"POST  HTTP/1.1")
    yield line("method-lower-case", REFUSED, b"post " + PATH + b" HTTP/1.1")
    yield line("method-unknown", REFUSED, b"BREW " + PATH + b" HTTP/1.1")
    yield line("method-no-token", BAD, b"PO(ST " + PATH + b" HTTP/1.1")
    for version in (
        b"HTTP/2.0",
        b"HTTP/3.0",
        b"HTTP/0.9",
        b"HTTP/1.10",
        b"http/1.1",
        b"HTTP/1",
        b"HTP/1.1",
    ):
        name = "version-" + version.decode()
        yield line(name, NO_SUCH_VERSION, b"POST " + PATH + b" " + version)
    newer = b"POST " + PATH + b" HTTP/1.2"
    yield line("version-newer", EITHER | NO_SUCH_VERSION, newer, prompts=True)
    yield sent("version-none", BAD_OR_ENDED, b"GET /health\r\n", prompts=(), wait_for=0)
    yield sent(
        "version-none-and-inner", BAD_OR_ENDED, b"GET /health\r\n" + INNER, prompts=(), wait_for=0
    )
    yield sent("lines-before", EITHER, b"\r\n\r\n" + head(known) + OUTER)
    yield sent(
        "tls-in-plain",
        BAD_OR_ENDED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        prompts=(),
        wait_for=0,
    )


def upgrades() -> Iterator[Variant]:
    """A server may pass over Upgrade (RFC 9110 7.8); the body is one either way."""
    for name, fields_ in {
        "h2c": (
            b"Connection: Upgrade, HTTP2-Settings",
            b"Upgrade: h2c",
            b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
        ),
        "h2c-without-settings": (b"Connection: Upgrade", b"Upgrade: h2c"),
        "foo": (b"Connection: Upgrade", b"Upgrade: foo"),
        "nginx": (b"Connection: upgrade",),
        "not-named": (b"Upgrade: foo",),
        "many": (b"Connection: keep-alive, Upgrade", b"Upgrade: foo/1, h2c, bar"),
    }.items():
        top = head(*fields_, length(OUTER))
        yield sent("upgrade-" + name, ANSWERED, top + OUTER)
        yield sent(f"upgrade-{name}-later", ANSWERED, top, OUTER)
        # No prompt in it: to an edge that reads the body, INNER is not JSON.
        yield sent(f"upgrade-{name}-inner", BAD, head(*fields_, length(INNER)), INNER, prompts=())
        chunked = chunk(INNER) + LAST
        yield sent(
            f"upgrade-{name}-chunked-inner", BAD, head(*fields_, CHUNKED), chunked, prompts=()
        )
    socket_ = (
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    refused = REFUSED | {(426,)}
    yield sent("upgrade-websocket-post", refused | ANSWERED, head(*socket_, length(OUTER)), OUTER)
    yield sent("upgrade-websocket-inner", refused, head(*socket_, length(INNER)), INNER, prompts=())
    for path, permitted in ((b"/v1/realtime", refused), (b"/health", refused | ANSWERED)):
        line = b"GET " + path + b" HTTP/1.1"
        name = "upgrade-websocket-" + path.decode()
        # Frames of a client that thinks itself upgraded.
        yield sent(name, permitted, head(*socket_, line=line), prompts=())
    yield sent(
        "upgrade-in-1.0",
        EITHER,
        head(
            b"Connection: Upgrade",
            b"Upgrade: foo",
            length(OUTER),
            line=b"POST " + PATH + b" HTTP/1.0",
        ),
        OUTER,
    )


def exchanges() -> Iterator[Variant]:
    """Several requests, or bodies that nobody reads."""
    second = post("second")
    two = frozenset({(200,), (200, 200)})
    yield sent("pipelined", two, post("outer") + second, prompts=("outer", "second"), wait_for=2)
    yield sent(
        "pipelined-later", two, post("outer"), second, prompts=("outer", "second"), wait_for=2
    )
    yield sent(
        "rubbish-behind",
        frozenset({(200,), (200, 400)}),
        post("outer") + b"garbage\r\n\r\n",
        wait_for=2,
    )
    preface = frozenset({(200,), (200, 400), (200, 505)})
    yield sent("preface-behind", preface, post("outer") + PREFACE, wait_for=2)
    yield sent("preface-behind-later", preface, post("outer"), PREFACE, wait_for=2)
    partial = PREFACE[:10] + b"X\r\n\r\n"
    yield sent("preface-wrong", BAD_OR_ENDED | {(505,)}, partial, prompts=(), wait_for=0)
    for name, line, permitted in (
        ("health", b"GET /health HTTP/1.1", ANSWERED | BAD),
        ("no-route", b"POST /nowhere HTTP/1.1", frozenset({(404,)})),
        ("no-method", b"PUT " + PATH + b" HTTP/1.1", frozenset({(405,)})),
        ("delete", b"DELETE " + PATH + b" HTTP/1.1", frozenset({(405,)})),
    ):
        # Bodies that no application reads end where they said.
        yield sent(f"unread-{name}", permitted, head(length(INNER), line=line) + INNER, prompts=())
        yield sent(
            f"unread-{name}-later", permitted, head(length(INNER), line=line), INNER, prompts=()
        )
        body = chunk(INNER) + LAST
        yield sent(f"unread-{name}-chunked", permitted, head(CHUNKED, line=line), body, prompts=())
    top = head(length(INNER), line=b"HEAD /health HTTP/1.1")
    yield sent("unread-head", ANSWERED | BAD, top + INNER, prompts=(), head_only=True)
    wrong_type = head(b"Content-Type: text/plain", length(INNER)).replace(
        b"Content-Type: application/json\r\n", b""
    )
    yield sent("unread-type", frozenset({(415,)}), wrong_type, INNER, prompts=())
    # Names in Connection are hop-by-hop for a proxy; here they change nothing about the body.
    for name, value in {
        "key": b"close, X-Api-Key",
        "length": b"close, Content-Length",
        "coding": b"Transfer-Encoding",
        "many": b"a," * 500 + b"close",
    }.items():
        yield sent(
            "hop-by-hop-" + name, EITHER, head(b"Connection: " + value, length(OUTER)) + OUTER
        )
    expected = head(b"Expect: 100-continue", length(OUTER))
    yield sent("expect", ANSWERED, expected + OUTER)
    yield sent(
        "expect-unknown", ANSWERED | {(417,)}, head(b"Expect: 200-ok", length(OUTER)) + OUTER
    )
    yield sent(
        "expect-in-1.0",
        EITHER,
        head(b"Expect: 100-continue", length(OUTER), line=b"POST " + PATH + b" HTTP/1.0") + OUTER,
    )


def sizes() -> Iterator[Variant]:
    """Heads that are too large, whole or in the making."""
    known = length(OUTER)
    long = b"GET /" + b"x" * 200_000 + b" HTTP/1.1"
    yield sent("long-target", TOO_LARGE, head(line=long), prompts=(), wait_for=0)
    query = b"GET /health?" + b"x" * 200_000 + b" HTTP/1.1"
    yield sent("long-query", TOO_LARGE, head(line=query), prompts=(), wait_for=0)
    yield sent(
        "long-method",
        TOO_LARGE | REFUSED,
        head(line=b"X" * 200_000 + b" / HTTP/1.1"),
        prompts=(),
        wait_for=0,
    )
    yield sent(
        "long-value",
        TOO_LARGE,
        head(b"X-A: " + b"x" * 200_000, known) + OUTER,
        prompts=(),
        wait_for=0,
    )
    yield sent(
        "long-name", TOO_LARGE, head(b"X" * 200_000 + b": a", known) + OUTER, prompts=(), wait_for=0
    )
    many = [b"X-%d: a" % number for number in range(20_000)]
    yield sent("many-fields", TOO_LARGE, head(*many, known) + OUTER, prompts=(), wait_for=0)
    same = [b"A:"] * 3000
    yield sent("many-empty-fields", EITHER | TOO_LARGE, head(*same, known) + OUTER)


KINDS = (lengths, codings, chunks, fields, hosts, targets, upgrades, exchanges, sizes)
VARIANTS = [variant for kind in KINDS for variant in kind()]


@pytest.mark.deep
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_one_request_has_one_answer(edge: EdgeProcess, variant: Variant) -> None:
    said = exchange(
        edge.host_and_port,
        variant.segments,
        wait_for=variant.wait_for,
        head_only=variant.head_only,
        ends=variant.ends,
    )
    healthy(edge.host_and_port)
    asked = [each.prompt for each in edge.asked()]
    assert tuple(asked) == variant.prompts[: len(asked)]
    assert said.whole and said.statuses in variant.permitted
    check_texts(said, variant.prompts)


def check_texts(said: Said, prompts: Iterable[str]) -> None:
    """Every completion is that of the request that is answered."""
    completions = [a.text for a in said.answers if a.status == 200 and b'"choices"' in a.body]
    assert completions == [completion_of(each) for each in prompts][: len(completions)]


def test_a_body_comes_when_it_was_asked_for(edge: EdgeProcess) -> None:
    with connected(edge.host_and_port) as connection:
        connection.sendall(head(b"Expect: 100-continue", length(OUTER)))
        interim = b""
        while b"\r\n\r\n" not in interim:
            more = connection.recv(1000)
            assert more
            interim += more
        assert interim.startswith(b"HTTP/1.1 100 ")
        connection.sendall(OUTER)
        said = answers_of(connection, 1)
    assert said.statuses == (200,) and said.answers[0].text == completion_of("outer")


def test_requests_follow_each_other_on_one_connection(edge: EdgeProcess) -> None:
    """Also behind what is left out, refused or odd in one, and is no reason to end it."""
    upgrade = (b"Connection: Upgrade", b"Upgrade: h2c")
    with connected(edge.host_and_port) as connection:
        for number in range(5):
            connection.sendall(post(f"text {number}", *upgrade))
            said = answers_of(connection, 1)
            assert said.answers[0].text == completion_of(f"text {number}")
            connection.sendall(HEALTH)
            assert answers_of(connection, 1).statuses == (200,)


@pytest.mark.parametrize("stated", [b"Trailer: traceparent\r\n", b""])
def test_a_trailer_is_no_header(edge: EdgeProcess, stated: bytes) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01".encode()
    body = chunk(OUTER) + b"0\r\nTraceparent: " + trace + b"\r\n\r\n"
    top = head(CHUNKED, *([stated.strip()] if stated else []))
    said = exchange(edge.host_and_port, [top, body])
    assert said.statuses == (200,)
    assert [each.traceparent for each in edge.asked()] == [""]
