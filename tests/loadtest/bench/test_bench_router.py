"""The router's benchmark counts what came, and runs to its end with a real router between."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import pytest

from baton_loadtest.bench.router import GrpcStreams, SseStream
from baton_loadtest.bench.synthetic import WORD, Decode, Times
from batonlm.cli.main import main
from batonlm.testing.scripted import ScriptedKv
from batonlm.v1 import decode_pb2, types_pb2
from batonlm.v1 import inference_pb2 as pb


class Sent(asyncio.Transport):
    """A transport that goes nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


def grpc_frames(*texts: str) -> bytes:
    """HTTP/2 frames of stream 1, one for each text, then its trailers."""
    found = b""
    for text in texts:
        delta = pb.ChoiceDelta(text=text)
        message = pb.GenerateResponse(event=pb.GenerationEvent(delta=delta)).SerializeToString()
        payload = struct.pack(">BI", 0, len(message)) + message
        found += struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", 0, 0, 1) + payload
    return found + b"\0\0\0" + struct.pack(">BBI", 1, 5, 1)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_grpc_text_is_counted_however_it_is_cut(piece: int) -> None:
    drain = GrpcStreams(lambda: None)
    drain.connection_made(Sent())
    stream = drain.ask("word 1", 8)
    data = grpc_frames(WORD, WORD * 3)
    for start in range(0, len(data), piece):
        drain.data_received(data[start : start + piece])
    assert (stream.events, stream.tokens, stream.ended) == (2, 4, True)
    assert stream.first_s is not None


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_server_sent_text_is_counted_however_it_is_cut(piece: int) -> None:
    reader = SseStream(lambda: None)
    events = [json.dumps({"choices": [{"text": text}]}) for text in (WORD, WORD * 3)]
    data = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")).encode()
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    assert reader.stream.tokens == 4


async def test_unsent_steps_share_an_entry() -> None:
    decode = Decode(ScriptedKv(), Times())
    attempt = types_pb2.Attempt(request_id="r", choices=[0], token_ids=b"\x01\0\0\0")
    attempt.stop.max_tokens = 5
    await decode.prefill(decode_pb2.StartSequence(attempt=attempt))
    frames = [decode.frame(steps) for steps in (0, 1, 2, 9, 1)]
    entries = [[(t.position, len(t.token_ids) // 4) for t in frame.tokens] for frame in frames]
    assert entries == [[(0, 1)], [(1, 1)], [(2, 2)], [(4, 1)], []]
    assert frames[3].tokens[0].finish_reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.deep
def test_a_run(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    flags = ["--requests", "10", "--streams", "40", "--seconds", "1"]
    assert main(["bench", "router", *flags, "--json", str(file)]) == 0
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert len(found) == 16
    assert found["added to the time to first token, gRPC, p50"]["goal"] == 3
    for face in ("gRPC", "SSE"):
        name = f"CPU a token, 40 streams x 4 tokens/s, {face}"
        assert found[name]["value"] > 0
        assert found[f"{name}: tokens an event"]["value"] > 0.9
