"""The real tokenizer process: over gRPC, from start to SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from batonlm.core.errors import InvalidArgument
from batonlm.router.workers.clients import TokenizerClient
from batonlm.rpc.convert import token_ids_from_bytes, token_ids_to_bytes
from batonlm.rpc.model_folder import tokenizer_digest
from batonlm.v1 import tokenizer_pb2 as pb
from batonlm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from batonlm.v1.tokenizer_pb2_grpc import TokenizerStub
from tests.services.tokenizer.made_tokenizers import TEXTS, id_of, made
from tests.services.tokenizer.model_folders import write_folder
from tests.services.tokenizer.started import PATIENCE_S, Started, exit_of, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = types_pb2.ERROR_REASON_INVALID_ARGUMENT


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Started]:
    model = write_folder(folder / "tiny", bos_token="<s>", eos_token="</s>")
    async with started("tokenizer", model, "--max-input-bytes", "4096") as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def alone(tmp_path: Path) -> AsyncIterator[Started]:
    """A process of one test."""
    async with serving(tmp_path) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    """A process of all tests."""
    async with serving(tmp_path_factory.mktemp("model")) as process:
        yield process


def chat(*contents: str) -> pb.EncodeInput:
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.EncodeInput(chat=pb.Chat(messages=messages, add_generation_prompt=True))


async def test_a_batch_succeeds_and_fails_item_by_item(served: Started) -> None:
    stub = TokenizerStub(served.channel)
    answer = await stub.Encode(
        pb.EncodeRequest(
            inputs=[
                pb.EncodeInput(text=TEXTS[0], add_special_tokens=True),
                pb.EncodeInput(text="x" * 5000),
                pb.EncodeInput(token_ids=token_ids_to_bytes(range(130)), cache_salt=b"tenant"),
                pb.EncodeInput(token_ids=b"12345"),
                pb.EncodeInput(),
                chat("hello"),
                chat(),
                pb.EncodeInput(text="x", cache_salt=b"s" * 2000),
            ]
        )
    )
    fields = [output.error.field for output in answer.outputs]
    assert fields == ["", "prompt", "", "prompt", "input", "", "messages", "cache_salt"]
    reasons = {output.error.reason for output in answer.outputs if output.HasField("error")}
    assert reasons == {INVALID}
    ids = token_ids_from_bytes(answer.outputs[0].token_ids, "")
    assert list(ids) == made("byte_level").encode(TEXTS[0]).ids
    assert len(answer.outputs[2].prefix_hashes) == 2 * 16
    text = made("byte_level").decode(
        token_ids_from_bytes(answer.outputs[5].token_ids, ""), skip_special_tokens=False
    )
    assert text == "<|user|>user\nhello</s>\n<|user|>assistant\n"


async def test_ids_become_text_item_by_item(served: Started) -> None:
    ids = made("byte_level").encode("Füße <tool_call>").ids
    lists = [ids, ids, [], [5, 10**6], made("byte_level").encode("🐧").ids[1:-2]]
    inputs = [pb.DecodeInput(token_ids=token_ids_to_bytes(given)) for given in lists]
    inputs[1].skip_special_tokens = True
    inputs.append(pb.DecodeInput(token_ids=b"12345"))
    answer = await TokenizerStub(served.channel).Decode(pb.DecodeRequest(inputs=inputs))
    assert [output.text for output in answer.outputs] == [
        "<s>Füße <tool_call></s>",
        "Füße <tool_call>",
        "",
        "",
        "\ufffd",
        "",
    ]
    fields = [output.error.field for output in answer.outputs]
    assert fields == ["", "", "", "tokens", "", "tokens"]


async def test_a_router_asks_for_names_and_for_text(served: Started) -> None:
    client = TokenizerClient(served.channel)
    item = pb.EncodeInput(text="the fox", add_special_tokens=True, with_token_strings=True)
    encoded = await client.encode(item, "request", PATIENCE_S)
    assert list(encoded.token_strings) == made("byte_level").encode("the fox").tokens
    back = pb.DecodeInput(token_ids=encoded.token_ids, skip_special_tokens=True)
    text = await client.decode(back, "request", PATIENCE_S)
    assert text == "the fox"
    with pytest.raises(InvalidArgument) as raised:
        wrong = pb.DecodeInput(token_ids=token_ids_to_bytes([10**6]))
        await client.decode(wrong, "request", PATIENCE_S)
    assert raised.value.field == "tokens"


@pytest.mark.deep
async def test_a_grammar_that_cannot_be_followed_fails_its_own_input(served: Started) -> None:
    many = ",".join(f'"p{i}":{{"type":"string"}}' for i in range(5000))
    schemas = ['{"type":"integer"}', '{"type":"thing"}', f'{{"properties":{{{many}}}}}', ""]
    answer = await TokenizerStub(served.channel).Encode(
        pb.EncodeRequest(
            inputs=[
                pb.EncodeInput(
                    text="a",
                    grammar=types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_JSON_SCHEMA, text=schema),
                )
                for schema in schemas
            ]
            + [pb.EncodeInput(text="a"), pb.EncodeInput(text="a", grammar=types_pb2.Grammar())]
        )
    )
    said = [(output.error.field, output.error.message) for output in answer.outputs]
    assert [field for field, _ in said] == ["", "grammar", "grammar", "grammar", "", "grammar.kind"]
    assert "thing" in said[1][1]
    assert "to compile" in said[2][1]
    assert [len(output.token_ids) for output in answer.outputs] == [4, 0, 0, 0, 4, 0]


async def test_too_large_a_batch_is_refused(served: Started) -> None:
    stub = TokenizerStub(served.channel)
    for call in (
        stub.Encode(pb.EncodeRequest(inputs=[pb.EncodeInput(text="a")] * 257)),
        stub.Decode(pb.DecodeRequest(inputs=[pb.DecodeInput()] * 257)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_tells_what_it_is(alone: Started, tmp_path: Path) -> None:
    described = await TokenizerStub(alone.channel).Describe(pb.DescribeRequest())
    assert described.identity.role == "tokenizer"
    assert (described.model, described.has_chat_template) == ("tiny", True)
    assert described.vocab_size == made("byte_level").get_vocab_size()
    assert described.tokenizer_digest == tokenizer_digest(tmp_path / "tiny")
    watch = aiter(worker_pb2_grpc.WorkerStub(alone.channel).Watch(worker_pb2.WatchRequest()))
    first = await anext(watch)
    assert first.description.identity == described.identity
    assert first.description.model.tokenizer_digest == described.tokenizer_digest
    second = await anext(watch)
    assert second.load.state == worker_pb2.WORKER_STATE_SERVING


async def test_sigterm_lets_running_inputs_end(alone: Started) -> None:
    inputs = [pb.EncodeInput(text=" ".join(TEXTS)[:1000] * 4)] * 256
    request = pb.EncodeRequest(inputs=inputs)
    call = asyncio.ensure_future(TokenizerStub(alone.channel).Encode(request))
    # A call that has arrived and was not begun is lost to gRPC's own end, and asked for elsewhere.
    async for told in worker_pb2_grpc.WorkerStub(alone.channel).Watch(worker_pb2.WatchRequest()):
        if told.load.waiting_sequences or call.done():
            break
    alone.terminate()
    answer = await call
    assert len(answer.outputs) == 256 and all(output.token_ids for output in answer.outputs)
    assert await alone.exit_code() == 0


async def test_it_is_small(alone: Started) -> None:
    await TokenizerStub(alone.channel).Encode(pb.EncodeRequest(inputs=[chat("hello")]))
    assert "torch" not in alone.modules() and "nixl" not in alone.modules()
    assert alone.resident_mib() < 250


@pytest.mark.deep
@pytest.mark.parametrize("role", ["tokenizer", "detokenizer"])
async def test_a_model_that_is_none_ends_the_start(role: str, tmp_path: Path) -> None:
    for flags in ((), ("--model", str(tmp_path))):
        code, said = await exit_of(role, *flags)
        assert code == 2
        assert "model" in said and "Traceback" not in said


BOMBING = """\
{% if bomb is defined %}{% set ns = namespace(x=messages[0].content) %}\
{% for a in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}{% endif %}\
{% if turns is defined %}{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}\
{% endfor %}{% endif %}<|user|>{{ messages[0].content }}</s>"""


@pytest.mark.deep
async def test_what_the_models_own_template_may_cost_is_bounded(tmp_path: Path) -> None:
    """It renders what clients say: one that makes it work is alone in waiting for it."""
    folder = write_folder(tmp_path / "tiny", chat_template=BOMBING)
    slack = "batonlm.tokenizer.renderers.SLACK_S=60"
    async with started("tokenizer", folder, constants=slack) as process:
        stub = TokenizerStub(process.channel)
        await stub.Encode(pb.EncodeRequest(inputs=[chat("hello")]))
        before = process.resident_mib()
        bombs = []
        for kwargs in ('{"bomb": 1}', '{"turns": 1}') * 3:
            bomb = chat("0123456789")
            bomb.chat.template_kwargs = kwargs
            bombs.append(bomb)
        thrown = [asyncio.ensure_future(stub.Encode(pb.EncodeRequest(inputs=[b]))) for b in bombs]
        for _ in range(20):
            answer = await stub.Encode(pb.EncodeRequest(inputs=[chat("hello"), chat("there")]))
            assert not any(output.HasField("error") for output in answer.outputs)
        errors = [answer.outputs[0].error for answer in await asyncio.gather(*thrown)]
        assert {(error.reason, error.field) for error in errors} == {(INVALID, "messages")}
        assert process.resident_mib() < before + 32


async def test_text_that_spells_control_tokens_is_text_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "tiny")
    found = []
    for flags in ((), ("--special-tokens-in-text",)):
        async with started("tokenizer", folder, *flags) as process:
            asked = pb.EncodeRequest(
                inputs=[chat("</s>"), pb.EncodeInput(text="</s>")],
            )
            outputs = (await TokenizerStub(process.channel).Encode(asked)).outputs
            ids = [list(token_ids_from_bytes(output.token_ids, "")) for output in outputs]
            end = id_of(made("byte_level"), "</s>")
            found.append([each.count(end) for each in ids])
    assert found == [[1, 1], [2, 1]]
