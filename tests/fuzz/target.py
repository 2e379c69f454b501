"""A running Baton to throw things at, and whether it is still what it was before."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from batonlm.v1 import (
    decode_pb2,
    encode_pb2,
    inference_pb2,
    prefill_pb2,
    tokenizer_pb2,
    worker_pb2,
)
from batonlm.v1.decode_pb2_grpc import DecodeStub
from batonlm.v1.encode_pb2_grpc import EncodeStub
from batonlm.v1.prefill_pb2_grpc import PrefillStub
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub
from batonlm.v1.worker_pb2_grpc import WorkerStub
from tests.e2e.relay import PATIENCE_S, Answer, Relay, options
from tests.fuzz import seeds
from tests.fuzz.rpcs import served_at

SETTLED_S = 120.0
"""A bound for liveness: what a hand-over nobody collects holds is freed after 10 s."""

OPTIONS = (("grpc.max_send_message_length", -1),)


@dataclass
class Face:
    """One gRPC port. services: what is served there."""

    role: str
    address: str
    services: set[str]
    channel: grpc.Channel


class Target:
    """Six real processes. All that is asked of them afterwards is compared with how they began."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.faces = []
        for process in relay.processes():
            channel = relay.channel_to(process, OPTIONS)
            services = served_at(channel)
            self.faces.append(Face(process["role"], process["grpc"], services, channel))
        for face in self.faces:
            grpc.channel_ready_future(face.channel).result(timeout=PATIENCE_S)
        workers = [self._describe(role) for role in ("prefill", "decode")]
        self.seeds, self.words = seeds.seeds(workers), seeds.words(workers)
        # Once for what is made at first use: connections, thread pools, sessions, and the processes
        # that try grammars and render templates.
        self._let_go()
        self._ask()
        (encode,) = self.seeds["/baton.v1.Tokenizer/Encode"]
        TokenizerStub(self.face("tokenizer").channel).Encode(
            tokenizer_pb2.EncodeRequest.FromString(encode[0]), timeout=PATIENCE_S
        )
        (run,) = self.seeds["/baton.v1.Encode/Run"]
        EncodeStub(self.face("encode").channel).Run(
            encode_pb2.EncodeRunRequest.FromString(run[0]), timeout=PATIENCE_S
        )
        form = inference_pb2.StructuredOutput(regex="[a-z]+")
        relay.generate("one", options(max_tokens=2, form=form))
        self._answer = self._ask()
        self._pids = self._running()
        self._held = self._holding()
        self._logged = len(relay.log.read_bytes())

    def close(self) -> None:
        for face in self.faces:
            face.channel.close()

    def serving(self, service: str) -> list[Face]:
        return [face for face in self.faces if service in face.services]

    def face(self, role: str) -> Face:
        return next(face for face in self.faces if face.role == role)

    def check(self) -> None:
        """Nobody died, nothing is held, nothing was logged as our fault, and tokens are exact."""
        assert self._running() == self._pids
        self._let_go()
        assert self._ask() == self._answer
        deadline = time.monotonic() + SETTLED_S
        while over := self._over():
            assert time.monotonic() < deadline, f"still held, now and at first: {over}"
            time.sleep(0.1)
        log = self.relay.log.read_bytes()[self._logged :].decode(errors="replace")
        assert "Traceback" not in log, log[-6000:]
        self._logged += len(log.encode())

    def _ask(self) -> Answer:
        # Long enough to be handed over.
        answer = self.relay.generate(
            "one two " * 150, options(max_tokens=12, temperature=1.0, seed=5)
        )
        assert answer.accepted is not None
        answer.accepted.request_id = ""
        # How much of the prompt was still cached, and how long it took, is nobody's promise.
        assert answer.finished is not None
        answer.finished.cached_tokens = 0
        answer.finished.ClearField("stages")
        return answer

    def _let_go(self) -> None:
        """Calls off what valid calls among the bad ones have begun."""
        prefill = PrefillStub(self.face("prefill").channel)
        for request_id in seeds.REQUEST_IDS:
            for attempt in range(8):
                wish = prefill_pb2.CancelRequest(request_id=request_id, attempt=attempt)
                prefill.Cancel(wish, timeout=PATIENCE_S)
        hello = decode_pb2.SessionRequest(hello=decode_pb2.SessionHello(router=seeds.ROUTER))
        list(DecodeStub(self.face("decode").channel).Session(iter([hello]), timeout=PATIENCE_S))

    def _describe(self, role: str) -> worker_pb2.WorkerDescription:
        watch = WorkerStub(self.face(role).channel).Watch(
            worker_pb2.WatchRequest(), timeout=PATIENCE_S
        )
        first: worker_pb2.WatchResponse = next(iter(watch))
        watch.cancel()
        return first.description

    def _running(self) -> Sequence[tuple[str, int]]:
        """A process that died was started again, with another pid."""
        return [(process["role"], process["pid"]) for process in self.relay.processes()]

    def _holding(self) -> dict[str, float]:
        return {
            f"{process['role']} {what}": amount
            for process in self.relay.processes()
            for what, amount in _holding(process).items()
        }

    def _over(self) -> dict[str, tuple[float, float]]:
        now = self._holding()
        return {what: (now[what], self._held[what]) for what in now if now[what] > self._held[what]}


def _holding(process: dict[str, Any]) -> dict[str, float]:
    """File descriptors and tasks of a process; of one that says so, also its watchers."""
    try:
        with urllib.request.urlopen(process["metrics"], timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    except urllib.error.URLError as error:
        raise AssertionError(f"{process['role']} does not answer") from error
    told = dict(
        line.rsplit(" ", 1)
        for line in text.splitlines()
        if line.startswith(("baton_tasks", "baton_requests_open", "baton_streams"))
    )
    held = {name: float(value) for name, value in told.items()}
    return {**held, "descriptors": psutil.Process(process["pid"]).num_fds()}
