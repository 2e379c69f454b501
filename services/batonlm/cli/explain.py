"""`baton explain`: shows one request as a timeline, as a router recorded it."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from batonlm.cli import access
from batonlm.cli.access import Access
from batonlm.cli.http_client import ConnectionLost, HttpAnswer, HttpClient, Unreachable
from batonlm.core.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from batonlm.router.api.http.answer_schema import (
    Explained,
    ExplainedAttempt,
    ExplainedCandidate,
    ServedBy,
)
from batonlm.rpc.address import join, split

ASK_S = 10.0


def ask(routers: list[Access], path: str) -> bytes:
    """Returns the answer of the first router that has the request; asks one after the other.

    Raises NotFound if no router has it, Unavailable if some could not be reached, and
    Unauthenticated.
    """
    return asyncio.run(_ask(routers, path))


def path_of(request_id: str, query: str = "") -> str:
    """Returns the path of a request's record. Raises InvalidArgument for an invalid id."""
    if not request_id or len(request_id) > 256 or not request_id.isprintable():
        raise InvalidArgument("must be a request's id", field="ID")
    return f"/requests/{quote(request_id, safe='')}{query}"


def everyone(access: Access) -> list[Access]:
    """Returns one Access per address of a name: a headless service has one for each replica. With
    TLS it returns the name, for which the certificate is issued. Raises InvalidArgument."""
    host, port = split(access.address, "http")
    if access.ca is not None:
        return [access]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [access]
    if host == "localhost":
        return [access]
    addresses = dict.fromkeys(join(str(target[0]), port) for *_, target in found)
    return [replace(access, address=address) for address in addresses]


async def _ask(routers: list[Access], path: str) -> bytes:
    silent = []
    for router in routers:
        answer = await _try(router, path)
        if answer is None:
            silent.append(router.address)
        elif answer.status == 200:
            return answer.body
        elif answer.status == 401:
            raise Unauthenticated("the router wants an API key: the tenant's or an operator's")
        elif answer.status != 404 or _of_replay(answer.body):
            raise Unavailable(f"{router.address}: {_message(answer)}")
    if silent:
        raise Unavailable(f"nobody answers on {', '.join(silent)}")
    asked = "the router remembers" if len(routers) == 1 else f"{len(routers)} routers remember"
    raise NotFound(
        f"{asked} no such request of yours: it is another router's, or too long ago, or not kept"
    )


async def _try(router: Access, path: str) -> HttpAnswer | None:
    """Returns None if the router cannot be reached."""
    client = HttpClient(router)
    try:
        return await client.get(path, ASK_S)
    except (Unreachable, ConnectionLost, TimeoutError):
        return None
    finally:
        await client.close()


def _of_replay(body: bytes) -> bool:
    """Returns whether the request is known and only its replay is missing."""
    return _error(body).get("param") == "replay"


def _message(answer: HttpAnswer) -> str:
    return str(_error(answer.body).get("message", f"status {answer.status}"))


def _error(body: bytes) -> dict[str, Any]:
    with suppress(ValueError, TypeError, KeyError):
        error = json.loads(body)["error"]
        if isinstance(error, dict):
            return error
    return {}


BAR = 48
"""Characters for the duration of the whole request."""

_COLOURS = {
    "tokenize": "cyan",
    "turn": "yellow",
    "prefill_queue": "yellow",
    "prefill": "blue",
    "network": "white",
    "hand_over": "magenta",
    "decode": "green",
    "detokenize": "cyan",
}
_STATES = {"finished": "green", "running": "blue", "failed": "red"}


def show(request: Explained, console: Console | None = None) -> None:
    """Prints a request: plain text if the output is no terminal, ASCII bars if its encoding has no
    block characters."""
    out = console or Console(highlight=False, soft_wrap=True)
    full = "█" if "utf" in out.encoding.lower() else "#"
    _say(out, _headline(request), _STATES[request.state])
    _say(out, f"  {_tokens(request)}")
    if request.error is not None:
        _say(out, f"  {request.error.code}: {request.error.message}", "red")
    _say(out, "")
    _stages(out, request, full)
    _say(out, "")
    if request.split.why is not None:
        unused = request.split.configured and not request.split.used
        _say(out, f"why  {request.split.why}", "yellow" if unused else "")
    for attempt in request.attempts:
        _attempt(out, request, attempt, full)
    if request.num_attempts > len(request.attempts):
        _say(
            out,
            f"\n{request.num_attempts - len(request.attempts)} more attempts are not remembered",
        )


def _headline(request: Explained) -> str:
    asked = {"chat": "chat", "text": "text", "tokens": "token ids"}[request.asked]
    model = f" of {request.model}" if request.model else ""
    first = f", first text after {_s(request.first_token_s)}" if request.first_token_s else ""
    where = f" ({request.stage})" if request.stage else ""
    took = "for" if request.state == "running" else "after"
    return (
        f"{request.id}  {asked}{model}: {request.state}{where} {took} {_s(request.total_s)}{first}"
    )


def _tokens(request: Explained) -> str:
    cached = (
        f", {request.cached_tokens} of them cached" if request.cached_tokens is not None else ""
    )
    text = f"prompt {request.prompt_tokens} tokens{cached}"
    if request.choices:
        ends = ", ".join(f"{c.output_tokens} ({c.finish_reason or 'cut'})" for c in request.choices)
        text += f"; output {ends}"
        if saved := sum(c.saved_steps for c in request.choices):
            text += f", {saved} of them from drafts"
    if request.kv_bytes:
        text += f"; {_bytes(request.kv_bytes)} of KV handed over"
    return text


def _stages(out: Console, request: Explained, full: str) -> None:
    """Prints one line per stage; each bar begins where the one before ends."""
    passed = 0.0
    for field, seconds in request.stages.items():
        stage = field.removesuffix("_s")
        bar = _bar(passed, seconds, request.total_s, full)
        _say(out, f"  {stage:<18}{_s(seconds):>10}  {bar}", _COLOURS.get(stage, ""))
        passed += seconds


def _attempt(out: Console, request: Explained, attempt: ExplainedAttempt, full: str) -> None:
    ended = request.total_s if attempt.ended_s is None else attempt.ended_s
    bar = _bar(attempt.began_s, ended - attempt.began_s, request.total_s, full)
    title = f"attempt {attempt.number} {attempt.state}"
    colour = "red" if attempt.state == "failed" else ""
    _say(out, f"\n  {title:<18}{_s(ended - attempt.began_s):>10}  {bar}", colour)
    _say(out, f"    input {attempt.input_tokens} tokens, {attempt.position} of them output before")
    if attempt.why != request.split.why:
        _say(out, f"    {attempt.why}")
    for line in (_prefix(attempt), _prefill(attempt), _handover(attempt), _decode(attempt)):
        if line:
            _say(out, f"    {line}")
    for candidate in attempt.candidates:
        _say(
            out,
            f"      {_candidate(candidate)}",
            "" if candidate.filter_reason == "picked" else "dim",
        )
    if attempt.others:
        _say(out, f"      and {attempt.others} more", "dim")
    for loss in attempt.losses:
        _say(out, f"    lost {loss.phase} at {_s(loss.at_s)}: {loss.code}: {loss.message}", "red")


def _prefix(attempt: ExplainedAttempt) -> str:
    parts = [part for part in (_restored(attempt), _collected(attempt)) if part]
    return f"prefix    {'; '.join(parts)}" if parts else ""


def _restored(attempt: ExplainedAttempt) -> str:
    if attempt.restored is None:
        return ""
    parts = [f"{number} tokens from {tier}" for tier, number in attempt.restored.items()]
    return f"{', '.join(parts) or 'nothing from tiers'} in {_s(attempt.restore_s)}"


def _collected(attempt: ExplainedAttempt) -> str:
    prefix = attempt.prefix
    if prefix is None:
        return ""
    text = _worker(prefix.worker)
    if prefix.reason:
        text += f" ({prefix.reason.replace('_', ' ')})"
    if not prefix.outcome:
        return f"{text}  {prefix.planned_tokens} tokens to collect"
    text += f"  {prefix.tokens} of {prefix.planned_tokens} tokens collected"
    return f"{text} in {_s(prefix.collect_s)}: {prefix.outcome}"


def _prefill(attempt: ExplainedAttempt) -> str:
    if attempt.prefill is None:
        return ""
    text = f"prefill   {_worker(attempt.prefill)}"
    if attempt.prefill_s is not None:
        text += f"  queued {_s(attempt.prefill_queue_s)}, computed {_s(attempt.prefill_s)}"
    if attempt.prefill_cached_tokens is not None:
        text += f", {attempt.prefill_cached_tokens} tokens cached"
    if attempt.predicted_first_token_s is not None:
        text += f" (predicted {_s(attempt.predicted_first_token_s)})"
    return text


def _handover(attempt: ExplainedAttempt) -> str:
    if not attempt.kv_bytes:
        return ""
    return f"hand-over {_bytes(attempt.kv_bytes)}, complete {_s(attempt.kv_s)} after the start"


def _decode(attempt: ExplainedAttempt) -> str:
    if attempt.decode is None:
        return ""
    text = f"decode    {_worker(attempt.decode)}"
    if attempt.decode_cached_tokens is not None:
        text += f"  {attempt.decode_cached_tokens} tokens cached"
    if attempt.prefill is None and attempt.kv_s is not None and not attempt.moved:
        text += f", prefilled here in {_s(attempt.kv_s)}"
    return text


def _candidate(candidate: ExplainedCandidate) -> str:
    text = f"{candidate.worker.role:<8}{candidate.worker.instance_id}  {candidate.filter_reason}"
    if candidate.detail:
        text += f" ({candidate.detail})"
    cost = candidate.cost
    if cost is not None:
        parts = ", ".join(
            f"{name.removesuffix('_s')} {_s(seconds)}"
            for name, seconds in cost.items()
            if name.endswith("_s") and seconds
        )
        text += f"  cost {_s(cost.get('total'))}" + (f" = {parts}" if parts else "")
    return text


def _worker(worker: ServedBy) -> str:
    return f"{worker.instance_id} {worker.address}".rstrip()


def _bar(began: float, seconds: float, total: float, full: str) -> str:
    """Returns a bar of at least one character, so that a stage of no duration is visible."""
    if total <= 0.0:
        return ""
    start = min(BAR - 1, round(began / total * BAR))
    return " " * start + full * max(1, min(BAR - start, round(seconds / total * BAR)))


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 1024:.1f} KiB"


def _say(out: Console, text: str, style: str = "") -> None:
    """Prints a text without markup, so that a router's answer cannot control the terminal."""
    safe = "".join(c for c in text if c.isprintable() or c == "\n")
    out.print(safe, style=style or None, markup=False)


DEFAULT_ADDRESS = "127.0.0.1:8000"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        description="Asks routers what they remember of a request: its stages, its attempts, who "
        "was looked at and why it ran where it did.",
    )
    parser.add_argument(
        "id", metavar="ID", help="of an answer, or its header x-baton-request-id or x-request-id"
    )
    add_router_arguments(parser)
    parser.add_argument("--json", action="store_true", help="what the router says, as it is")
    parser.add_argument(
        "--replay", metavar="FILE", type=Path,
        help="write what 'baton replay' needs to make its tokens again, where routers keep that",
    )  # fmt: skip
    parser.add_argument(
        "--text", action="store_true",
        help="with --replay: also the grammar that the request named",
    )  # fmt: skip


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="HOST:PORT,…",
        help="routers that may know; every address of a name is asked "
        f"(default: where `baton up` runs, else {DEFAULT_ADDRESS})",
    )
    access.add_arguments(parser)


def routers_of(args: argparse.Namespace) -> list[access.Access]:
    """Returns all routers in the arguments. Raises InvalidArgument."""

    found = []
    for address in (args.http or "").split(","):
        one = copy.copy(args)
        one.http = address.strip().rpartition("/")[2] or None
        found += everyone(access.access_of(one, DEFAULT_ADDRESS, "http"))
    return found


def run(args: argparse.Namespace) -> int:
    """Returns 0 if a router has the request. Raises BatonError."""
    import msgspec

    from batonlm.router.api.http.answer_schema import Explained

    if args.replay is not None:
        query = "?replay=text" if args.text else "?replay=ids"
        _write(args.replay, ask(routers_of(args), path_of(args.id, query)))
        return 0
    text = ask(routers_of(args), path_of(args.id))
    if args.json:
        print(text.decode())
        return 0
    try:
        explained = msgspec.json.decode(text, type=Explained)
    except msgspec.MsgspecError:
        raise Unavailable(
            "the router is of another version than this command; see its answer with --json"
        ) from None
    show(explained)
    return 0


def _write(path: Path, document: bytes) -> None:
    """Writes a file that only its owner can read: it contains a prompt. Raises InvalidArgument."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(document + b"\n")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="replay") from None
