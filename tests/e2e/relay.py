"""Runs a real Baton (five stages, real processes) for tests, and talks to it as a client does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from batonlm.cli import state
from batonlm.cli.layout import APART
from batonlm.cli.ports import free_ports
from batonlm.rpc import peers
from batonlm.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests import leaks

START_TIMEOUT_S = 240
PATIENCE_S = 180.0
"""For what must happen in the end: it guards against a hang on a machine that is busy elsewhere."""
TRIES = 10
PAUSE_S = 0.02
"""Between two looks. Each costs the processes that it asks processor time, too."""
STARTING_PAUSE_S = 0.2
"""The same while processes start, which takes seconds and all the time that there is."""


@dataclass
class Answer:
    """What a Generate or Chat stream gave, gathered by choice."""

    text: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    accepted: inference_pb2.RequestAccepted | None = None
    finished: inference_pb2.RequestFinished | None = None

    def take(self, event: inference_pb2.GenerationEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted = event.accepted
            case "finished":
                self.finished = event.finished
            case "delta":
                delta = event.delta
                self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
                self.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
                if delta.finish_reason:
                    self.finish[delta.choice] = delta.finish_reason


def options(
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    n: int = 1,
    ignore_eos: bool = True,
    stop: Sequence[str] = (),
    form: inference_pb2.StructuredOutput | None = None,
) -> inference_pb2.GenerationOptions:
    return inference_pb2.GenerationOptions(
        sampling=types_pb2.SamplingParams(temperature=temperature, seed=seed),
        stop=types_pb2.StopParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_strings=list(stop)
        ),
        n=n,
        return_token_ids=True,
        structured_output=form,
    )


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Shows a token with every call, as Baton's own channels do."""

    def __init__(self, token: str) -> None:
        self._shown = (peers.PEER_TOKEN_KEY, token)

    def _call(self, proceed: Any, details: Any, sent: Any) -> Any:
        metadata = [*(details.metadata or ()), self._shown]
        return proceed(details._replace(metadata=metadata), sent)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call


class Relay:
    """One `baton up --detach` with a state folder of its own."""

    def __init__(self, folder: Path, *flags: str, environment: Mapping[str, str] = {}) -> None:
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder), "NO_COLOR": "1"}
        # By the workers' own measurements it would depend on the machine who prefills.
        self.environment["BATON_LOCAL_PREFILL_TOKENS"] = str(APART)
        # A worker that was killed may take long to start again.
        self.environment["BATON_WAIT_TIMEOUT_S"] = str(PATIENCE_S)
        self.environment |= environment
        self.log = folder / "baton" / "up.log"
        self.http_port, self.grpc_port = free_ports(2)
        ports = ("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port))
        started = self.baton("up", "--detach", *ports, *flags, timeout=START_TIMEOUT_S)
        assert started.returncode == 0, started.stderr + self.logs()
        self.description = json.loads(started.stdout)
        self.state_file = folder / "baton" / "up.json"
        self.supervisor = int(json.loads(self.state_file.read_text())["pid"])
        self.channel = grpc.insecure_channel(self.description["grpc"])
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.client = httpx.Client(base_url=self.http, timeout=PATIENCE_S)
        """For many requests: a client of its own for each reads all certificates, in 27 ms."""
        leaks.SOURCES[self] = self.workers

    def baton(self, *words: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batonlm.cli.main", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def close(self) -> None:
        self.channel.close()
        self.client.close()
        leaks.SOURCES.pop(self, None)
        for worker in self.workers():
            leaks.check(worker)
        self.baton("down")

    def logs(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    @property
    def http(self) -> str:
        return str(self.description["http"])

    def processes(self, role: str = "") -> list[dict[str, Any]]:
        """As the state file says now; pids change when a process was restarted."""
        found: list[dict[str, Any]] = json.loads(self.state_file.read_text())["processes"]
        return [p for p in found if role in ("", p["role"])]

    def workers(self) -> list[leaks.RunningWorker]:
        """Those that hold something for requests; none once it was stopped."""
        if not self.state_file.exists():
            return []
        found = [p for p in self.processes() if p["role"] in ("router", "prefill", "decode")]
        token = self._token()
        return [leaks.RunningWorker(p["pid"], p["metrics"], token, p["started"]) for p in found]

    def _token(self) -> str:
        return str(json.loads(self.state_file.read_text())["token"])

    @property
    def router(self) -> dict[str, Any]:
        (found,) = self.processes("router")
        return found

    def running(self, role: str) -> dict[int, float]:
        """Sequences, or texts, of each worker of a role that answers, by its pid."""
        found = {}
        for process in self.processes(role):
            with suppress(OSError):  # It has ended, or starts.
                found[process["pid"]] = self.metric(process, "baton_sequences")
        return found

    def busiest(self, role: str) -> dict[str, Any]:
        """The worker with most sequences, or texts. It may have none by now."""
        there = self.running(role)
        return max(self.processes(role), key=lambda p: there.get(p["pid"], 0.0))

    def wait_for_all(self, gone: int = 0) -> None:
        """Until all processes run and the router sees every worker serve. gone: a pid in whose
        place there is another."""

        def serve() -> bool:
            found = self.processes()
            if gone in [p["pid"] for p in found] or not all(map(state.alive, found)):
                return False
            return self.metric(self.router, "baton_workers", state="serving") == len(found) - 1

        eventually(serve, PATIENCE_S, "all workers serve", STARTING_PAUSE_S)

    def lost_attempts(self) -> float:
        """Attempts that had to be run again."""
        names = ("baton_migrations_total", "baton_retries_total")
        return sum(self.metric(self.router, name) for name in names)

    def idle(self) -> bool:
        """Whether every request has ended."""
        return self.metric(self.router, "baton_requests_open") == 0

    def channel_to(self, process: dict[str, Any], options: Any = None) -> grpc.Channel:
        """A channel as Baton's own processes have them. Close it."""
        token = self._token()
        channel = grpc.insecure_channel(process["grpc"], options=options)
        return grpc.intercept_channel(channel, _WithToken(token))

    def kill(self, process: dict[str, Any], number: int = signal.SIGKILL) -> None:
        """Nothing happens if the process has ended."""
        with suppress(ProcessLookupError):
            os.kill(process["pid"], number)

    def lost(self, role: str) -> set[str]:
        """Ids of the requests that lost a worker of this role so far, by the router's log. The log
        is written a moment after the loss."""
        found = re.findall(
            rf" request_id=(\w+) .*lost_at={role} reason=(?!OVERLOADED)", self.log.read_text()
        )
        return set(found)

    def stream(
        self, prompt: Sequence[int] | str, wanted: inference_pb2.GenerationOptions
    ) -> Iterator[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(options=wanted)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self.stub.Generate(request, timeout=PATIENCE_S)

    def generate(
        self, prompt: Sequence[int] | str, wanted: inference_pb2.GenerationOptions
    ) -> Answer:
        answer = Answer()
        for response in self.stream(prompt, wanted):
            answer.take(response.event)
        return answer

    def chat(self, text: str, wanted: inference_pb2.GenerationOptions) -> Answer:
        from batonlm.v1 import tokenizer_pb2

        request = inference_pb2.ChatRequest(
            messages=[tokenizer_pb2.ChatMessage(role="user", content=text)], options=wanted
        )
        answer = Answer()
        for response in self.stub.Chat(request, timeout=PATIENCE_S):
            answer.take(response.event)
        return answer

    def metric(self, process: dict[str, Any], name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        text = leaks.RunningWorker(process["pid"], process["metrics"], self._token()).read()
        total = 0.0
        for line in text.splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                total += float(match[2])
        return total


def happens(check: Any, timeout_s: float, pause_s: float = PAUSE_S) -> bool:
    """Whether a check holds at some moment of this time; returns as soon as it does."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True


def happens_during(runs: Iterable[Future[Any]], check: Callable[[], bool]) -> bool:
    """Whether a check holds at some moment before all of these have ended; returns as soon as it
    does, or they have."""
    held = False

    def over() -> bool:
        nonlocal held
        held = check()
        return held or all(run.done() for run in runs)

    happens(over, PATIENCE_S)
    return held


def eventually(check: Any, timeout_s: float, what: str, pause_s: float = PAUSE_S) -> None:
    """Waits until a check holds; the time is a bound for liveness, not a measurement."""
    assert happens(check, timeout_s, pause_s), f"not within {timeout_s} s: {what}"


def until_it_comes_about(scenario: Callable[[], bool], what: str) -> None:
    """Runs a scenario again, which returns whether it came about, until it does.

    A process that disturbs streams may itself be delayed for as long as these take. Then they have
    ended undisturbed, and nothing was tested."""
    for _ in range(TRIES):
        if scenario():
            return
        print(f"once more, since this did not come about: {what}")
    raise AssertionError(f"not in {TRIES} tries: {what}")
