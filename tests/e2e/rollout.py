"""A Baton whose workers are upgraded one after the other, under load.

A new worker is started, then the old one is told to leave, as a rolling update does it. Unlike
`baton up` this starts and ends single processes, of more than one build.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc

from batonlm.cli.http_client import met, scrape, total
from batonlm.cli.layout import Layout, ProcessSpec, UpOptions, plan
from batonlm.cli.ports import free_ports
from batonlm.v1 import inference_pb2, inference_pb2_grpc
from tests import leaks
from tests.e2e.relay import PATIENCE_S, Answer, eventually

Asked = tuple[list[int], inference_pb2.GenerationOptions]


class Rollout:
    """Two addresses for each of prefill and decode: 0 is the old one's, 1 the new one's.

    old, new: what the builds are, in the words of `other_build`. flags: of
    the engine workers, by name.
    """

    def __init__(self, folder: Path, *, old: str = "", new: str = "", **flags: str) -> None:
        http, grpc_port = free_ports(2)
        self._builds = {"0": old.split(), "1": new.split()}
        self._flags = {name.replace("_", "-"): words.split() for name, words in flags.items()}
        # All but nothing is prefilled apart, whatever this machine's speed is.
        router = ("--local-prefill-tokens", "0", "--wait-timeout-s", "10")
        options = UpOptions(
            prefill=2, decode=2, runner="fake", http_port=http, grpc_port=grpc_port,
            kv_memory_mib=64, threads=1, router_flags=router,
        )  # fmt: skip
        self._layout: Layout = plan(options)
        self._specs = {spec.name: spec for spec in self._layout.processes}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._log = (folder / "log").open("w")
        self.channel = grpc.insecure_channel(self._layout.grpc)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def __enter__(self) -> Rollout:
        try:
            self.start("tokenizer-0", "prefill-0", "decode-0", "detokenizer-0", "router-0")
            self.serves(decode=1, prefill=1, tokenizer=1, detokenizer=1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._log.close()

    def start(self, *names: str) -> None:
        """Returns when they serve."""
        for name in names:
            self._processes[name] = subprocess.Popen(
                self._command(self._specs[name]),
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            )
        for name in names:
            stdout = self._processes[name].stdout
            assert stdout is not None
            while "role" not in json.loads(line := stdout.readline() or "{}"):
                assert line != "{}", f"{name} ended"

    def leave(self, name: str) -> int:
        """Tells a worker to leave. Returns its exit code."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(PATIENCE_S)

    def serves(self, **wanted: int) -> None:
        """Returns when the router knows so many workers."""
        url = self._layout.metrics_url(self._specs["router-0"])

        def knows() -> bool:
            found = met(url, None)
            return all(found[role] == count for role, count in wanted.items())

        eventually(knows, PATIENCE_S, str(wanted))

    def replace(self, role: str) -> int:
        """A new worker comes, then the old one leaves. Returns its exit code."""
        self.start(f"{role}-1")
        self.serves(**{role: 2})
        code = self.leave(f"{role}-0")
        self.serves(**{role: 1})
        return code

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """The sum of a live process's samples that carry these labels."""
        url = self._layout.metrics_url(self._specs[name])
        return total(
            scrape(url, timeout_s=PATIENCE_S),
            metric,
            *(f'{key}="{value}"' for key, value in labels.items()),
        )

    def idle(self, *names: str) -> None:
        """Waits until these workers hold nothing, and fails when that does not happen."""
        for name in names:
            spec = self._specs[name]
            url = self._layout.metrics_url(spec)
            leaks.check(leaks.RunningWorker(self._processes[name].pid, url))

    def stream(
        self, prompt: Sequence[int], wanted: inference_pb2.GenerationOptions
    ) -> Iterator[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(options=wanted)
        request.token_ids.ids.extend(prompt)
        return self.stub.Generate(request, timeout=PATIENCE_S)

    def ask(self, prompt: Sequence[int], wanted: inference_pb2.GenerationOptions) -> Answer:
        answer = Answer()
        for response in self.stream(prompt, wanted):
            answer.take(response.event)
        return answer

    def _command(self, spec: ProcessSpec) -> list[str]:
        build = self._builds[str(spec.index)] if spec.role in ("prefill", "decode") else []
        command = [*spec.command, *self._flags.get(spec.name, [])]
        if build:
            assert command[1:4] == ["-m", "batonlm.testing.worker", spec.role]
            command[2:3] = ["tests.e2e.other_build", *build]
        return command


class Load:
    """Asks the same things over and over, several at a time, and keeps every answer."""

    def __init__(self, rollout: Rollout, asked: Sequence[Asked]) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._rollout, self._asked = rollout, asked
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(asked))
        self._clients: list[Future[None]] = [
            self._pool.submit(self._repeat, number) for number in range(len(asked))
        ]

    def _repeat(self, number: int) -> None:
        while not self._stop.is_set():
            self.answers.append((number, self._rollout.ask(*self._asked[number])))

    def goes_on(self, rounds: int = 2, when: Callable[[], bool] = lambda: True) -> None:
        """Returns when as many more answers came as all clients give in so many rounds."""
        wanted = len(self.answers) + rounds * len(self._asked)

        def enough() -> bool:
            broken = any(client.done() for client in self._clients)
            return broken or (len(self.answers) >= wanted and when())

        eventually(enough, PATIENCE_S, "more answers")
        for client in self._clients:
            if client.done():
                client.result()

    def end(self) -> list[tuple[int, Answer]]:
        """Every answer with its request's number. Raises what any of the streams ended with."""
        self._stop.set()
        with self._pool:
            for client in self._clients:
                client.result(PATIENCE_S)
        return self.answers
