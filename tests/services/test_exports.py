"""Each of the five processes, real, sends the span of a call to a receiver before it exits."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from batonlm.core.observe.stages import TraceContext
from batonlm.core.request.attempt import Attempt
from batonlm.rpc.convert import attempt_to_proto
from batonlm.rpc.tracing import metadata_of
from batonlm.v1 import detokenizer_pb2, prefill_pb2, tokenizer_pb2
from batonlm.v1.decode_pb2_grpc import DecodeStub
from batonlm.v1.detokenizer_pb2_grpc import DetokenizerStub
from batonlm.v1.prefill_pb2_grpc import PrefillStub
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub
from tests.receiver import Received, Receiver, receiver
from tests.services.tokenizer.started import started
from tests.services.worker.pair import PATIENCE_S, attempt
from tests.services.worker.processes import LOOPBACK, worker
from tests.services.worker.router_end import RouterEnd

MODEL = Path(str(files("batonlm"))) / "models" / "baton-tiny"
THEIRS = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


@pytest.fixture
def exported() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def one() -> Attempt:
    return replace(attempt(size=40, max_tokens=4), traceparent=THEIRS.traceparent)


def the_call(exported: Receiver, service: str, name: str) -> Received:
    (found,) = [span for span in exported.spans if span.name == name]
    assert found.service == service and len(found.instance_id) == 32
    assert found.span.trace_id.hex() == "a" * 32
    assert found.span.parent_span_id.hex() == "b" * 16
    return found


@pytest.mark.deep
async def test_tokenizer(exported: Receiver) -> None:
    async with started("tokenizer", MODEL, "--otlp-endpoint", exported.endpoint) as process:
        request = tokenizer_pb2.EncodeRequest(inputs=[tokenizer_pb2.EncodeInput(text="hello")])
        await TokenizerStub(process.channel).Encode(request, metadata=metadata_of(THEIRS))
        process.terminate()
        assert await process.exit_code() == 0
    the_call(exported, "baton-tokenizer", "tokenizer.encode")


async def test_detokenizer(exported: Receiver) -> None:
    async with started("detokenizer", MODEL, "--otlp-endpoint", exported.endpoint) as process:
        session = DetokenizerStub(process.channel).Session()
        opening = detokenizer_pb2.OpenText(traceparent=THEIRS.traceparent)
        bad = detokenizer_pb2.OpenText(traceparent=THEIRS.traceparent, token_ids=b"12345")
        operations = [
            detokenizer_pb2.DetokenizeOperation(text_id=1, open=opening),
            detokenizer_pb2.DetokenizeOperation(text_id=2, open=bad),
        ]
        await session.write(detokenizer_pb2.DetokenizerSessionRequest(operations=operations))
        told = False
        while not told:
            # The second one's error comes when both were read; signs of life may come before.
            answer = await session.read()
            assert isinstance(answer, detokenizer_pb2.DetokenizerSessionResponse)
            told = bool(answer.deltas)
        session.cancel()
        process.terminate()
        assert await process.exit_code() == 0
    span = the_call(exported, "baton-detokenizer", "detokenizer.text")
    assert span.attributes == {"baton.text.tokens": 0, "error.type": "cancelled"}


@pytest.mark.deep
async def test_prefill(exported: Receiver) -> None:
    flags = ("--otlp-endpoint", exported.endpoint, *LOOPBACK)
    async with worker("batonlm.prefill", MODEL, *flags) as process:
        run = prefill_pb2.RunRequest(attempt=attempt_to_proto(one()))
        await PrefillStub(process.channel).Run(run)
        await process.idle()
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
    run_span = the_call(exported, "baton-prefill", "prefill.run")
    parts = [span for span in exported.spans if span.is_below(run_span)]
    assert [span.name for span in parts] == ["prefill.queue", "prefill.compute"]


@pytest.mark.deep
async def test_decode(exported: Receiver) -> None:
    flags = ("--otlp-endpoint", exported.endpoint, *LOOPBACK)
    async with worker("batonlm.decode", MODEL, *flags) as process:
        router = RouterEnd(DecodeStub(process.channel), process.identity, process.identity)
        await router.connect()
        await router.start(one())
        await router.ended(one())
        await router.break_off()
        await process.idle()
        process.process.send_signal(signal.SIGTERM)
        assert await process.exit_code() == 0
    run_span = the_call(exported, "baton-decode", "decode.run")
    parts = [span for span in exported.spans if span.is_below(run_span)]
    assert [span.name for span in parts] == ["decode.prefill", "decode.generate"]


@pytest.mark.deep
async def test_router(exported: Receiver) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batonlm.router", "--wait-timeout-s", "0"),
        *("--otlp-endpoint", exported.endpoint, "--trace-sample-share", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            told = json.loads(await process.stdout.readline())
        await asyncio.to_thread(refused, f"http://{told['http']}/v1/completions", THEIRS)
        await asyncio.to_thread(refused, f"http://{told['http']}/v1/completions", TraceContext())
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    span = the_call(exported, "baton-router", "text_completion")
    assert span.attributes["error.type"] == "unavailable"


def refused(url: str, trace: TraceContext) -> None:
    """A router without workers answers 503."""
    headers = {"content-type": "application/json", **dict(metadata_of(trace))}
    request = urllib.request.Request(url, b'{"prompt": "hello"}', headers)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    assert refusal.value.code == 503
    refusal.value.close()
