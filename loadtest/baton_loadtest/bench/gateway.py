"""SMG's gateway beside the router: unmodified, before a synthetic engine of its own gRPC protocol.

The engine says the same as the router's synthetic workers do, at the same pace: one message per
token and request, because the protocol has no other. The gateway does more than Baton's router: it
tokenizes and makes text itself, which Baton leaves to other processes.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer

from baton_loadtest.bench.synthetic import MODEL, WORD
from baton_loadtest.child import answer
from baton_loadtest.drive import HttpLoadClient
from baton_loadtest.launch import START_S, BatonProcess, ContenderFailed, pinned
from batonlm.cli.access import Access
from batonlm.cli.ports import free_ports
from batonlm.core.errors import BatonError, Unimplemented
from batonlm.rpc.server import ProcessServer, Service

FOLDER = Path(str(files("batonlm"))) / "models" / "baton-tiny"
"""Of the gateway's tokenizer."""
WORD_ID = 515
"""WORD, by that tokenizer."""
NAME_TOKENS = 12
"""At the end of a prompt; they have its last word whole."""


class Engine(pb_grpc.VllmEngineServicer):
    """Every step makes one token per request; a request that was not written in time gets all that
    it missed in one message."""

    def __init__(self, serve_s: float) -> None:
        self._times: dict[str, float] = {}
        """Seconds to the first token, by the last word of the prompt."""
        self._serve_s = serve_s
        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._step_s, self._step = 0.1, 0
        self._changed, self._stepped = asyncio.Event(), asyncio.Event()
        self._ticking = asyncio.create_task(self._tick())

    def pace(self, step_s: float) -> None:
        self._step_s = step_s
        self._changed.set()

    def take_times(self) -> dict[str, float]:
        """Returns the seconds to each first token since the last call."""
        times, self._times = self._times, {}
        return times

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.wait([self._ticking])

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + self._step_s
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
                self._changed.clear()
                due = clock()
            except TimeoutError:
                self._step += 1
                self._stepped, stepped = asyncio.Event(), self._stepped
                stepped.set()
            due += self._step_s

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        began = perf_counter()
        await asyncio.sleep(self._serve_s)
        name = self._tokenizer.decode(request.tokenized.input_ids[-NAME_TOKENS:]).split()[-1]
        self._times[name] = perf_counter() - began
        prompt = len(request.tokenized.input_ids)
        left, step, new = request.sampling_params.max_tokens, self._step, 1
        made = 0
        while made < left:
            made += new
            chunk = pb.GenerateStreamChunk(
                token_ids=[WORD_ID] * new, prompt_tokens=prompt, completion_tokens=new
            )
            yield pb.GenerateResponse(chunk=chunk)
            if self._step == step:
                await self._stepped.wait()
            new, step = min(left - made, self._step - step), self._step
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=[WORD_ID] * made,
                finish_reason="length",
                prompt_tokens=prompt,
                completion_tokens=made,
            )
        )

    async def SubscribeKvEvents(self, request: object, context: object) -> None:
        raise Unimplemented("There is no cache.")

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Any
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model_path=str(FOLDER),
            tokenizer_path=str(FOLDER),
            is_generation=True,
            max_context_length=MODEL.max_model_len,
            vocab_size=MODEL.vocab_size,
            served_model_name=MODEL.name,
            eos_token_ids=MODEL.eos_token_ids,
            max_req_input_len=MODEL.max_model_len - 1,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(server_type="vllm", data_parallel_size=1)


async def serve_engine() -> None:
    """Answers what `synthetic.serve_workers` does, as an engine."""
    opened: list[Engine] = []
    servers: list[ProcessServer] = []

    async def handle(command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "open":
                engine = Engine(command["serve_s"])
                opened.append(engine)
                service = Service(
                    "vllm.grpc.engine.VllmEngine",
                    lambda server: pb_grpc.add_VllmEngineServicer_to_server(engine, server),
                )
                return {
                    "engine": await ProcessServer(listen="127.0.0.1:0", services=[service]).start()
                }
            case "step":
                opened[0].pace(command["step_s"])
                return {}
            case "sessions":
                return {"sessions": 1}
            case _:
                return {"engine": opened[0].take_times()}

    await answer(handle)
    for engine, server in zip(opened, servers, strict=True):
        await engine.close()
        await server.stop(0)


@asynccontextmanager
async def gateway(program: str, engine: str, core: int) -> AsyncIterator[BatonProcess]:
    """Starts SMG before an engine at host:port; ends it with the block.

    Raises ContenderFailed if it does not answer.
    """
    port, metrics = free_ports(2)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            started = await asyncio.create_subprocess_exec(
                *pinned(core),
                *(program, "launch", "--host", "127.0.0.1", "--port", str(port)),
                *("--worker-urls", f"grpc://{engine}", "--model-path", str(FOLDER)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
                *("--log-level", "warn"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        address = f"127.0.0.1:{port}"
        try:
            if not await _answers(address, started):
                lines = log.read_text(errors="replace").strip().splitlines()
                raise ContenderFailed(f"SMG does not answer: {lines[-1:]}")
            yield BatonProcess(started.pid, {"http": address})
        finally:
            if started.returncode is None:
                started.kill()
            await started.wait()


async def _answers(address: str, process: asyncio.subprocess.Process) -> bool:
    """Waits until it answers a request; returns whether it did in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + START_S
    body = {"model": MODEL.name, "prompt": "word 1", "max_tokens": 1, "ignore_eos": True}
    while process.returncode is None and loop.time() < until:
        said: list[bytes] = []
        try:
            client = HttpLoadClient(Access(address))
            await client.send(client.post("/v1/completions", body), said.append)
        except (BatonError, OSError):
            said.clear()
        if WORD.encode() in b"".join(said):
            return True
        await asyncio.sleep(0.2)
    return False
