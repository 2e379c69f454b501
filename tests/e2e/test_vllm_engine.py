"""A whole Baton as one engine of a gateway: the same tokens as over Baton's own API."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from jsonschema import validate
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer

from batonlm.v1 import inference_pb2, types_pb2
from tests.e2e.relay import PATIENCE_S, Answer, Relay, eventually, options, until_it_comes_about
from tests.e2e.test_bad_input import violation

pytestmark = pytest.mark.deep

LENGTHS = (1, 2, 17, 64, 100, 255, 400, 600)
NEW_TOKENS = 24
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["big", "small"]},
            "name": {"type": "string", "maxLength": 9},
        },
        "required": ["kind", "name"],
        "additionalProperties": False,
    }
)
EXPLODES = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
LIMIT_S = 120


class Gateway:
    """What a gateway does with a running Baton."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self._channel = grpc.insecure_channel(relay.description["grpc"])
        self.stub = pb_grpc.VllmEngineStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ask(
        self, prompt: Sequence[int] | str, wanted: pb.SamplingParams, *, stream: bool = True
    ) -> dict[int, pb.GenerateComplete]:
        """How each choice ended. What was streamed of it has to be the same."""
        request = pb.GenerateRequest(request_id="e2e", sampling_params=wanted, stream=stream)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)
        streamed: dict[int, list[int]] = {}
        ends: dict[int, pb.GenerateComplete] = {}
        for message in self.stub.Generate(request, timeout=LIMIT_S):
            if message.HasField("complete"):
                ends[message.complete.index] = message.complete
            else:
                assert message.chunk.index not in ends
                streamed.setdefault(message.chunk.index, []).extend(message.chunk.token_ids)
        if stream:
            assert streamed == {index: list(end.output_ids) for index, end in ends.items()}
        return ends

    def bundle(self) -> zipfile.ZipFile:
        chunks = self.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=LIMIT_S)
        return zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks)))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    relay = Relay(tmp_path_factory.mktemp("engine"), "--vllm-engine")
    made = Gateway(relay)
    yield made
    made.close()
    relay.close()


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 400) for _ in range(length)] for length in LENGTHS]


def check(ends: dict[int, pb.GenerateComplete], own: Answer) -> None:
    assert {index: list(end.output_ids) for index, end in ends.items()} == own.token_ids
    words = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}
    reasons = {index: end.finish_reason for index, end in ends.items()}
    assert reasons == {index: words[reason] for index, reason in own.finish.items()}  # type: ignore[index]
    assert own.finished is not None
    assert sum(end.completion_tokens for end in ends.values()) == own.finished.completion_tokens
    assert {end.prompt_tokens for end in ends.values()} == {own.finished.prompt_tokens}


def test_greedy_tokens_are_those_of_batons_own_api(gateway: Gateway) -> None:
    asked = prompts()
    right = [gateway.relay.generate(p, options(max_tokens=NEW_TOKENS)) for p in asked]
    wanted = pb.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for stream in (True, False):
        with ThreadPoolExecutor(len(asked)) as pool:
            told = pool.map(lambda p, s=stream: gateway.ask(p, wanted, stream=s), asked)
            for ends, own in zip(told, right, strict=True):
                check(ends, own)
    router = gateway.relay.processes("router")[0]
    assert gateway.relay.metric(router, "baton_kv_bytes_total") > 0


def test_text_sampling_stops_and_choices(gateway: Gateway) -> None:
    text = "Tell me a story about yourself."
    own = options(max_tokens=60, temperature=1.0, seed=9, n=3, stop=["e"])
    wanted = pb.SamplingParams(
        max_tokens=60, seed=9, n=3, stop=["e"], skip_special_tokens=True, ignore_eos=True
    )
    ends = gateway.ask(text, wanted)
    check(ends, gateway.relay.generate(text, own))
    stopped = [end for end in ends.values() if end.finish_reason == "stop"]
    assert any(end.matched_stop_str == "e" for end in stopped)


def test_a_prefix_hit_is_reported(gateway: Gateway) -> None:
    prompt = list(range(50, 450))
    wanted = pb.SamplingParams(temperature=0.0, max_tokens=2)
    gateway.ask(prompt, wanted)
    assert gateway.ask(prompt, wanted)[0].cached_tokens >= 256


def test_a_form_is_followed_and_a_bad_one_named(gateway: Gateway) -> None:
    form = inference_pb2.StructuredOutput(json_schema=SCHEMA)
    text = "Tell me about yourself."
    own = options(max_tokens=120, temperature=1.0, seed=4, ignore_eos=False, form=form)
    ends = gateway.ask(text, pb.SamplingParams(max_tokens=120, seed=4, json_schema=SCHEMA))
    check(ends, gateway.relay.generate(text, own))
    with gateway.bundle() as archive:
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    validate(json.loads(tokenizer.decode(list(ends[0].output_ids))), json.loads(SCHEMA))
    for name, bad in (
        ("regex", pb.SamplingParams(regex="(")),
        ("grammar", pb.SamplingParams(grammar="root ::= other")),
        ("json_schema", pb.SamplingParams(json_schema=json.dumps(EXPLODES))),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            gateway.ask(text, bad)
        named = violation(caught.value)
        assert named == (grpc.StatusCode.INVALID_ARGUMENT, f"sampling_params.{name}")


def test_log_probabilities_of_a_prompt(gateway: Gateway) -> None:
    prompt = prompts()[3]
    wanted = pb.SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    end = gateway.ask(prompt, wanted, stream=False)[0]
    assert list(end.input_logprobs.token_ids) == prompt
    first, *rest = end.input_logprobs.token_logprobs
    assert not first.HasField("value") and all(one.value <= 0 for one in rest)
    for top, token in zip(end.output_logprobs.top_logprobs, end.output_ids, strict=True):
        assert top.token_ids[0] == token and top.values[0] >= top.values[1]


def test_an_abort_ends_a_request_of_real_workers(gateway: Gateway) -> None:
    wanted = pb.SamplingParams(max_tokens=1500, ignore_eos=True, n=2)
    request = pb.GenerateRequest(request_id="long", text="x", sampling_params=wanted, stream=True)

    def it_was_aborted() -> bool:
        """Whether it still ran when it was to end."""
        ends, aborted = [], False
        for message in gateway.stub.Generate(request, timeout=LIMIT_S):
            if not aborted:
                gateway.stub.Abort(pb.AbortRequest(request_ids=["long"]), timeout=LIMIT_S)
                aborted = True
            if message.HasField("complete"):
                ends.append(message.complete.finish_reason)
        if "length" in ends:
            return False
        assert ends == ["abort", "abort"]
        return True

    until_it_comes_about(it_was_aborted, "an abort before the last token")

    def idle() -> bool:
        load = gateway.stub.GetLoads(pb.GetLoadsRequest(), timeout=LIMIT_S).loads[0]
        return not (load.num_total_reqs or load.num_used_tokens)

    eventually(idle, PATIENCE_S, "nothing runs and no blocks are in use")


def test_what_it_says_of_itself(gateway: Gateway) -> None:
    assert gateway.stub.HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S).healthy
    model = gateway.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=LIMIT_S)
    assert (model.served_model_name, model.model_type) == ("baton-tiny", "llama")
    assert not Path(model.model_path).is_absolute()
    assert not Path(model.tokenizer_path).is_absolute()
    server = gateway.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=LIMIT_S)
    assert server.max_num_seqs > 0 and not server.kv_connector
    load = gateway.stub.GetLoads(pb.GetLoadsRequest(), timeout=LIMIT_S).loads[0]
    assert load.max_total_num_tokens > 0
