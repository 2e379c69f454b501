"""Valid calls, as a start for those that are not quite: by path, a list of streams of messages.

An RPC that has none here is fuzzed from empty messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2

from batonlm.v1 import (
    decode_pb2,
    detokenizer_pb2,
    encode_pb2,
    handover_pb2,
    inference_pb2,
    prefill_pb2,
    tokenizer_pb2,
    types_pb2,
    worker_pb2,
)
from tests.fuzz.messages import Words

REQUEST_IDS = ("fuzz-1", "fuzz-2", "fuzz-3")
ROUTER = types_pb2.WorkerIdentity(role="router", instance_id="f" * 32)
IDS = b"".join(number.to_bytes(4, "little") for number in range(20, 60))
REMAINING_MS = (1, 200)

Seeds = Mapping[str, Sequence[Sequence[bytes]]]
Description = worker_pb2.WorkerDescription


def words(workers: Sequence[Description]) -> Words:
    """What processes know each other and their requests by."""
    instance_ids = [worker.identity.instance_id.encode() for worker in workers]
    handovers = [bytes([number]) * 16 for number in (1, 2, 3)]
    return {
        "request_id": [name.encode() for name in REQUEST_IDS],
        "instance_id": [*instance_ids, b"f" * 32, b"g" * 32],
        "decode_instance_id": [*instance_ids, b""],
        "prefill_instance_id": [*instance_ids, b""],
        "sender_instance_id": instance_ids,
        "receiver_instance_id": instance_ids,
        "address": [worker.identity.address.encode() for worker in workers] + [b"", b"no address"],
        "handover_id": handovers,
        "token_ids": [IDS, IDS[:4], IDS * 500, b"\xff\xff\xff\x7f"],
        "spell_token_ids": [IDS, b"\xff\xff\xff\x7f"],
        "dtype": [b"float32", b"bfloat16"],
        "role": [b"user", b"system", b"assistant", b"decode", b"prefill"],
        "transports": [b"nixl", b"loopback"],
        "model": [worker.model.name.encode() for worker in workers],
        "remaining_ms": REMAINING_MS,
        "max_tokens": (1, 8),
        "num_prompt_tokens": (1, 40),
        "dimensions": (0, 1, 8, 2**20),
        "truncate_tokens": (-1, 0, 1, 4),
        "prompt_name": [b"", b"query", b"none"],
        "max_kv_chunk_bytes": (2**16, 2**22),
        "probe_positions": (0, 1, 16),
        "text_id": (0, 1, 2),
        "list_services": [b""],
        "file_containing_symbol": [b"baton.v1.Decode", b"baton.v1.SamplingParams.seed"],
        "service": [b"", b"baton.v1.Decode", b"baton.v1.Inference"],
    }


def seeds(workers: Sequence[Description]) -> Seeds:
    """workers: the descriptions of the prefill and the decode worker, in this order."""
    prefill, decode = workers
    receiver = types_pb2.WorkerIdentity(role="decode", instance_id=decode.identity.instance_id)
    hello = decode_pb2.SessionRequest(
        hello=decode_pb2.SessionHello(router=ROUTER, decode_instance_id=decode.identity.instance_id)
    )
    here = decode_pb2.StartSequence(attempt=_attempt(0), max_unconfirmed=8)
    there = decode_pb2.StartSequence(
        attempt=_attempt(1),
        source=decode_pb2.KvSource(handover_id=b"\1" * 16, sender=prefill.identity),
    )
    named = {"request_id": REQUEST_IDS[0], "choice": 0}
    confirm = decode_pb2.ConfirmPositions(
        sequences=[decode_pb2.SequencePosition(**named, position=2)]  # type: ignore[arg-type]
    )
    hand_over = decode_pb2.HandOverSequence(
        request_id=REQUEST_IDS[0],
        handover_id=b"\2" * 16,
        receiver_instance_id=decode.identity.instance_id,
    )
    cancel = decode_pb2.CancelSequence(request_id=REQUEST_IDS[0])
    session = (
        hello,
        decode_pb2.SessionRequest(start=here),
        decode_pb2.SessionRequest(confirm=confirm),
        decode_pb2.SessionRequest(hand_over=hand_over),
        decode_pb2.SessionRequest(cancel=cancel),
    )
    options = inference_pb2.GenerationOptions(
        sampling=types_pb2.SamplingParams(temperature=1.0, seed=7, top_logprobs=2),
        stop=types_pb2.StopParams(max_tokens=4, stop_strings=["stop"]),
        n=2,
    )
    chat = [tokenizer_pb2.ChatMessage(role="user", content="hi")]
    called = tokenizer_pb2.ChatMessage(
        role="assistant",
        tool_calls=[types_pb2.ToolCall(id="c", name="f", arguments=r'{"a": "\ud800"}')],
    )
    tool = types_pb2.Tool(name="f", parameters=r'{"properties": {"\udc00": {"const": "\ud800"}}}')
    run = prefill_pb2.RunRequest(attempt=_attempt(2))
    give = prefill_pb2.RunRequest(
        attempt=_attempt(3),
        handover_id=b"\3" * 16,
        decode_instance_id=decode.identity.instance_id,
        prefill_instance_id=prefill.identity.instance_id,
    )
    meet = handover_pb2.MeetRequest(
        receiver=receiver,
        layout=prefill.layout,
        transports=list(prefill.transports),
        sender_instance_id=prefill.identity.instance_id,
    )
    probe = handover_pb2.OpenHandover(
        handover_id=b"\4" * 16,
        receiver=receiver,
        sender_instance_id=prefill.identity.instance_id,
        max_kv_chunk_bytes=2**22,
        probe_positions=1,
    )
    collect = (
        handover_pb2.CollectRequest(open=probe),
        handover_pb2.CollectRequest(granted=handover_pb2.HandoverGranted(from_position=0)),
        handover_pb2.CollectRequest(credit=handover_pb2.HandoverCredit(num_kv_chunks=1)),
        handover_pb2.CollectRequest(collected=handover_pb2.KvChunkCollected(index=0)),
        handover_pb2.CollectRequest(completed=handover_pb2.HandoverCompleted()),
    )
    append = detokenizer_pb2.AppendTokens(token_ids=IDS, spell_token_ids=IDS[:8], last=True)
    texts = (
        detokenizer_pb2.DetokenizerSessionRequest(
            operations=[
                detokenizer_pb2.DetokenizeOperation(
                    text_id=1, open=detokenizer_pb2.OpenText(stop_strings=["x"], token_texts=True)
                ),
                detokenizer_pb2.DetokenizeOperation(text_id=1, append=append),
            ]
        ),
    )
    encode = tokenizer_pb2.EncodeRequest(
        inputs=[
            tokenizer_pb2.EncodeInput(text="hello", add_special_tokens=True),
            tokenizer_pb2.EncodeInput(
                chat=tokenizer_pb2.Chat(messages=chat, template_kwargs='{"a": [1]}')
            ),
            tokenizer_pb2.EncodeInput(
                chat=tokenizer_pb2.Chat(messages=chat, template="{{ messages[0].content }}")
            ),
            tokenizer_pb2.EncodeInput(
                chat=tokenizer_pb2.Chat(
                    messages=[*chat, called],
                    tools=[tool],
                    template="{{ messages[1].tool_calls[0].function.arguments.a }}{{ tools }}",
                )
            ),
            tokenizer_pb2.EncodeInput(token_ids=IDS, with_token_strings=True),
        ]
    )
    ids_to_text = tokenizer_pb2.DecodeRequest(
        inputs=[
            tokenizer_pb2.DecodeInput(token_ids=IDS),
            tokenizer_pb2.DecodeInput(token_ids=IDS, skip_special_tokens=True),
        ]
    )
    query = encode_pb2.TextPair(query="a query", document="a document")
    vectors = encode_pb2.EncodeRunRequest(
        inputs=[
            encode_pb2.VectorInput(text="hello"),
            encode_pb2.VectorInput(token_ids=IDS[:16]),
            encode_pb2.VectorInput(pair=query),
        ],
        dimensions=8,
        truncate_tokens=-1,
    )
    engine = vllm_engine_pb2.SamplingParams(
        max_tokens=4, stop=["stop"], n=2, seed=7, logprobs=2, logit_bias={5: 1.0}, regex="[a-z]+"
    )
    ids = vllm_engine_pb2.TokenizedInput(input_ids=range(20, 60))
    as_one = {"request_id": REQUEST_IDS[1], "sampling_params": engine, "stream": True}
    by_path: Mapping[str, Sequence[Sequence[Message]]] = {
        "/baton.v1.Decode/Session": (
            session,
            session[:2],
            (hello, decode_pb2.SessionRequest(start=there)),
        ),
        "/baton.v1.Handover/Collect": (collect,),
        "/baton.v1.Handover/Meet": ((meet,),),
        "/baton.v1.Detokenizer/Session": (texts,),
        "/baton.v1.Prefill/Run": ((run,), (give,)),
        "/baton.v1.Tokenizer/Encode": ((encode,),),
        "/baton.v1.Tokenizer/Decode": ((ids_to_text,),),
        "/baton.v1.Encode/Run": ((vectors,),),
        "/baton.v1.Inference/Embed": (
            (
                inference_pb2.EmbedRequest(
                    inputs=[
                        inference_pb2.EmbedInput(text="hello"),
                        inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=[5, 6])),
                    ],
                    truncate_tokens=8,
                ),
            ),
        ),
        "/baton.v1.Inference/Score": (
            (inference_pb2.ScoreRequest(query="a query", documents=["one", "two"]),),
        ),
        "/baton.v1.Inference/Generate": (
            (inference_pb2.GenerateRequest(text="hello", options=options),),
        ),
        "/vllm.grpc.engine.VllmEngine/Generate": (
            (vllm_engine_pb2.GenerateRequest(text="hello", **as_one),),  # type: ignore[arg-type]
            (vllm_engine_pb2.GenerateRequest(tokenized=ids, **as_one),),  # type: ignore[arg-type]
        ),
        "/vllm.grpc.engine.VllmEngine/Abort": (
            (vllm_engine_pb2.AbortRequest(request_ids=REQUEST_IDS),),
        ),
        "/baton.v1.Inference/Chat": (
            (inference_pb2.ChatRequest(messages=chat, options=options),),
            (inference_pb2.ChatRequest(messages=[*chat, called], options=options, tools=[tool]),),
        ),
    }
    return {
        path: [[message.SerializeToString() for message in stream] for stream in streams]
        for path, streams in by_path.items()
    }


def _attempt(number: int) -> types_pb2.Attempt:
    return types_pb2.Attempt(
        request_id=REQUEST_IDS[0],
        attempt=number,
        choices=[0],
        token_ids=IDS,
        num_prompt_tokens=len(IDS) // 4,
        sampling=types_pb2.SamplingParams(temperature=1.0, seed=7),
        stop=types_pb2.StopParams(max_tokens=8),
        remaining_ms=2000,
    )
