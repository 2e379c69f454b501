"""A decode worker on two machines loses a rank or one machine: its streams go on elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from batonlm.cli.ports import free_ports
from batonlm.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.relay import PATIENCE_S, Relay, eventually, until_it_comes_about
from tests.e2e.streams import Following, requests, undisturbed
from tests.engine.machines import (
    HERE,
    TOKEN,
    SecondMachine,
    needs_root,
    ranks_below,
    second_machine,
)

pytestmark = [pytest.mark.chaos, pytest.mark.deep, pytest.mark.timeout(900), needs_root]

MODEL = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
LOCAL = "127.0.0.1:0"
START_S = 240


class Spread(Relay):
    """A relay with one more decode worker, on two machines, and a router of its own over all."""

    def __init__(self, folder: Path, machine: SecondMachine, ends: ExitStack) -> None:
        # As many ranks in a stage: then a stream that moves goes on with the same tokens.
        few = ("--prefill", "1", "--decode", "1", "--tensor-parallel", "2")
        # Its decode worker stands by: streams begin on the other one.
        super().__init__(folder, *few, environment={"BATON_STANDBY": "true"})
        ends.callback(super().close)
        self.machine = machine
        leader = f"{HERE}:{free_ports(1)[0]}"
        self.there = machine.start(leader)
        ends.callback(_end, self.there)
        token = json.loads(self.state_file.read_text())["token"]
        environment = os.environ | {"BATON_PEER_TOKEN": token, "BATON_RANKS_TOKEN": TOKEN}
        self.worker, said = _start(
            "batonlm.decode",
            *("--model", str(MODEL), "--device", "cpu", "--threads", "2"),
            *("--listen", LOCAL, "--metrics-listen", LOCAL, "--kv-memory-mib", "64"),
            *("--tensor-parallel", "2", "--pipeline-parallel", "2"),
            *("--machines", "2", "--ranks-listen", leader),
            environment=environment,
        )
        ends.callback(_end, self.worker)
        self.spread = {"pid": self.worker.pid, "metrics": f"http://{said['metrics']}/metrics"}
        known = {
            role: [process["grpc"] for process in self.processes(role)]
            for role in ("tokenizer", "prefill", "decode", "detokenizer")
        }
        known["decode"].append(said["listen"])
        process, said = _start(
            "batonlm.router",
            *(part for role, found in known.items() for part in (f"--{role}s", ",".join(found))),
            *("--grpc-listen", LOCAL, "--http-listen", LOCAL, "--local-prefill-tokens", "0"),
            environment=environment,
        )
        ends.callback(_end, process)
        self.own = {"pid": process.pid, "metrics": f"http://{said['http']}/metrics"}
        channel = ends.enter_context(grpc.insecure_channel(said["grpc"]))
        self.own_stub = inference_pb2_grpc.InferenceStub(channel)
        eventually(self.all_serve, START_S, "all workers serve")

    @property
    def router(self) -> dict[str, Any]:
        """The one over all."""
        return self.own

    def all_serve(self) -> bool:
        return self.metric(self.router, "baton_workers", state="serving") == 5

    def stream(
        self, prompt: Sequence[int] | str, wanted: inference_pb2.GenerationOptions
    ) -> Iterator[inference_pb2.GenerateResponse]:
        assert not isinstance(prompt, str)
        request = inference_pb2.GenerateRequest(options=wanted)
        request.token_ids.ids.extend(prompt)
        return self.own_stub.Generate(request, timeout=240)


def _start(
    module: str, *flags: str, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """The process, and what it says when it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--log-level", "error", *flags],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = json.loads(process.stdout.readline() or b"null")
    assert said, f"{module} does not serve"
    return process, said


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.parametrize("victim", [pytest.param("rank", marks=pytest.mark.slow), "cable"])
def test_streams_go_on_elsewhere(tmp_path_factory: pytest.TempPathFactory, victim: str) -> None:
    asked = requests()[:8]

    def streams_lost_a_machine() -> bool:
        with ExitStack() as ends:
            machine = ends.enter_context(second_machine())
            spread = Spread(tmp_path_factory.mktemp("spread"), machine, ends)
            expected = [answer.token_ids for answer in undisturbed(spread, asked)]
            streams = Following(spread, asked)
            streams.settled()
            ranks = ranks_below(spread.there)
            assert len(ranks) == 2
            if victim == "rank":
                ranks[1].kill()
            else:
                machine.cut()
            assert [answer.token_ids for answer in streams.answers()] == expected
            lost = spread.lost_attempts()
            assert spread.worker.wait(PATIENCE_S) == 1
            assert spread.there.wait(PATIENCE_S) == 1
            _, alive = psutil.wait_procs(ranks, PATIENCE_S)
            assert not alive
            return lost > 0

    until_it_comes_about(streams_lost_a_machine, "streams on a worker that loses a machine")
