"""Draws one explained request in a terminal; asks nobody.

Plain text where the output is no terminal; bars of ASCII where its encoding has no others.
"""

from __future__ import annotations

from rich.console import Console

from baton.router.api.http.answer_schema import (
    Explained,
    ExplainedAttempt,
    ExplainedCandidate,
    ServedBy,
)

BAR = 48
"""Characters of the request's whole time."""

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


def show(told: Explained, console: Console | None = None) -> None:
    """Prints it."""
    out = console or Console(highlight=False, soft_wrap=True)
    full = "█" if "utf" in out.encoding.lower() else "#"
    _say(out, _headline(told), _STATES[told.state])
    _say(out, f"  {_tokens(told)}")
    if told.error is not None:
        _say(out, f"  {told.error.code}: {told.error.message}", "red")
    _say(out, "")
    _stages(out, told, full)
    _say(out, "")
    if told.split.why is not None:
        unused = told.split.configured and not told.split.used
        _say(out, f"why  {told.split.why}", "yellow" if unused else "")
    for attempt in told.attempts:
        _attempt(out, told, attempt, full)
    if told.num_attempts > len(told.attempts):
        _say(out, f"\n{told.num_attempts - len(told.attempts)} more attempts are not remembered")


def _headline(told: Explained) -> str:
    asked = {"chat": "chat", "text": "text", "tokens": "token ids"}[told.asked]
    model = f" of {told.model}" if told.model else ""
    first = f", first text after {_s(told.first_token_s)}" if told.first_token_s else ""
    where = f" ({told.stage})" if told.stage else ""
    took = "for" if told.state == "running" else "after"
    return f"{told.id}  {asked}{model}: {told.state}{where} {took} {_s(told.total_s)}{first}"


def _tokens(told: Explained) -> str:
    cached = f", {told.cached_tokens} of them cached" if told.cached_tokens is not None else ""
    said = f"prompt {told.prompt_tokens} tokens{cached}"
    if told.choices:
        ends = ", ".join(f"{c.output_tokens} ({c.finish_reason or 'cut'})" for c in told.choices)
        said += f"; output {ends}"
    if told.kv_bytes:
        said += f"; {_bytes(told.kv_bytes)} of KV handed over"
    return said


def _stages(out: Console, told: Explained, full: str) -> None:
    """One line a stage, each beginning where the one before ends."""
    passed = 0.0
    for field, seconds in told.stages.items():
        stage = field.removesuffix("_s")
        bar = _bar(passed, seconds, told.total_s, full)
        _say(out, f"  {stage:<18}{_s(seconds):>10}  {bar}", _COLOURS.get(stage, ""))
        passed += seconds


def _attempt(out: Console, told: Explained, attempt: ExplainedAttempt, full: str) -> None:
    ended = told.total_s if attempt.ended_s is None else attempt.ended_s
    bar = _bar(attempt.began_s, ended - attempt.began_s, told.total_s, full)
    title = f"attempt {attempt.number} {attempt.state}"
    colour = "red" if attempt.state == "failed" else ""
    _say(out, f"\n  {title:<18}{_s(ended - attempt.began_s):>10}  {bar}", colour)
    _say(out, f"    input {attempt.input_tokens} tokens, {attempt.position} of them output before")
    if attempt.why != told.split.why:
        _say(out, f"    {attempt.why}")
    for line in (_prefill(attempt), _handover(attempt), _decode(attempt)):
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


def _prefill(attempt: ExplainedAttempt) -> str:
    if attempt.prefill is None:
        return ""
    said = f"prefill   {_worker(attempt.prefill)}"
    if attempt.prefill_s is not None:
        said += f"  queued {_s(attempt.prefill_queue_s)}, computed {_s(attempt.prefill_s)}"
    if attempt.prefill_cached_tokens is not None:
        said += f", {attempt.prefill_cached_tokens} tokens cached"
    if attempt.predicted_first_token_s is not None:
        said += f" (predicted {_s(attempt.predicted_first_token_s)})"
    return said


def _handover(attempt: ExplainedAttempt) -> str:
    if not attempt.kv_bytes:
        return ""
    return f"hand-over {_bytes(attempt.kv_bytes)}, complete {_s(attempt.kv_s)} after the start"


def _decode(attempt: ExplainedAttempt) -> str:
    if attempt.decode is None:
        return ""
    said = f"decode    {_worker(attempt.decode)}"
    if attempt.decode_cached_tokens is not None:
        said += f"  {attempt.decode_cached_tokens} tokens cached"
    if attempt.prefill is None and attempt.kv_s is not None and not attempt.moved:
        said += f", prefilled here in {_s(attempt.kv_s)}"
    return said


def _candidate(candidate: ExplainedCandidate) -> str:
    said = f"{candidate.worker.role:<8}{candidate.worker.instance_id}  {candidate.filter_reason}"
    if candidate.detail:
        said += f" ({candidate.detail})"
    cost = candidate.cost
    if cost is not None:
        parts = ", ".join(
            f"{name.removesuffix('_s')} {_s(seconds)}"
            for name, seconds in cost.items()
            if name.endswith("_s") and seconds
        )
        said += f"  cost {_s(cost.get('total'))}" + (f" = {parts}" if parts else "")
    return said


def _worker(worker: ServedBy) -> str:
    return f"{worker.instance_id} {worker.address}".rstrip()


def _bar(began: float, seconds: float, total: float, full: str) -> str:
    """At least one character: what took no time was passed, too."""
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
    """Nothing that a router says may steer the terminal."""
    safe = "".join(c for c in text if c.isprintable() or c == "\n")
    out.print(safe, style=style or None, markup=False)
