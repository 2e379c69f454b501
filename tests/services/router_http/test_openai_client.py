"""The unmodified OpenAI client against the HTTP API over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from batonlm.core.admission.tenant_budgets import Limit, Refusal
from batonlm.core.errors import Internal, InvalidArgument, Overloaded
from batonlm.core.request.request import ChatPrompt
from tests.services.router_http.scripted import ADAPTER, MODEL, Scripted, whole_answer

# openai's overloads know neither extra parameters nor extra fields; both are looked at here.
Client = Any
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "<user>hello"
ANSWER = whole_answer(PROMPT, 0)


async def test_chat(client: Client) -> None:
    answer = await client.chat.completions.create(model=MODEL.name, messages=HELLO)
    assert answer.id == "chatcmpl-00000001"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL.name
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(ANSWER.encode())
    assert answer.usage.total_tokens == len(PROMPT) + len(ANSWER.encode())
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // 2


async def test_defaults_are_openais(client: Client, frontend: Scripted) -> None:
    await client.chat.completions.create(model=MODEL.name, messages=HELLO)
    await client.completions.create(model=MODEL.name, prompt="hi")
    chat, completion = frontend.seen
    assert chat.sampling.temperature == completion.sampling.temperature == 1.0
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)
    assert chat.seed is None and chat.n == 1 and chat.sampling.top_logprobs is None


async def test_every_parameter_arrives(client: Client, frontend: Scripted) -> None:
    await client.chat.completions.create(
        model=MODEL.name,
        messages=[
            {"role": "developer", "content": "short"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
        n=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"5": -100, "6": 1.5},
        seed=-1,
        stop=["x", "y"],
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [3, 4],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "priority": -2,
            "cache_salt": "sålt",
            "speculation": "off",
        },
    )
    (request,) = frontend.seen
    sampling = request.sampling
    assert isinstance(request.prompt, ChatPrompt)
    assert [(m.role, m.content) for m in request.prompt.messages] == [
        ("system", "short"),
        ("user", "ab"),
    ]
    assert (request.n, request.seed, request.max_tokens, request.min_tokens) == (2, 2**64 - 1, 9, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.25)
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert sampling.top_logprobs == 3
    assert (request.stop_strings, request.stop_token_ids) == (("x", "y"), (3, 4))
    assert request.ignore_eos and request.include_stop_string and request.return_token_ids
    assert not request.skip_special_tokens
    assert (request.priority, request.cache_salt) == (-2, "sålt".encode())
    assert request.no_speculation


async def test_streamed_chat(client: Client) -> None:
    stream = await client.chat.completions.create(
        model=MODEL.name,
        messages=HELLO,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-00000001"}
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    *rest, last = chunks
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in rest:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: ANSWER, 1: whole_answer(PROMPT, 1)}
    assert reasons == {0: "stop", 1: "stop"}
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 2 * len(ANSWER.encode())


async def test_continuous_usage(client: Client) -> None:
    stream = await client.chat.completions.create(
        model=MODEL.name,
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(ANSWER.encode()))


async def test_streamed_completion(client: Client) -> None:
    stream = await client.completions.create(
        model=MODEL.name, prompt=["ab", "cd"], stream=True, n=2, max_tokens=100
    )
    texts = {i: "" for i in range(4)}
    reasons = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    prompts = ["ab", "ab", "cd", "cd"]
    assert texts == {i: whole_answer(p, i % 2) for i, p in enumerate(prompts)}
    assert set(reasons) == set(texts)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (list(b"ab"), ["ab"]),
        ([list(b"ab"), list(b"c")], ["ab", "c"]),
    ],
)
async def test_prompt_forms(client: Client, prompt: str | list[str], prompts: list[str]) -> None:
    answer = await client.completions.create(model=MODEL.name, prompt=prompt, max_tokens=100)
    assert answer.id == "cmpl-00000001"
    assert [choice.text for choice in answer.choices] == [whole_answer(p, 0) for p in prompts]
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


async def test_length_and_stops(client: Client) -> None:
    short = await client.completions.create(model=MODEL.name, prompt="abcdef", max_tokens=4)
    assert (short.choices[0].text, short.choices[0].finish_reason) == ("0:fe", "length")
    stopped = await client.completions.create(
        model=MODEL.name, prompt="abcdef", max_tokens=99, stop="cb"
    )
    assert stopped.choices[0].text == "0:fed"
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == "cb"


async def test_chat_logprobs(client: Client) -> None:
    answer = await client.chat.completions.create(
        model=MODEL.name, messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [token.bytes for token in content] == [[byte] for byte in ANSWER.encode()]
    assert content[0].token == "0" and content[0].logprob == -0.48
    assert content[-1].token == "\ufffd"
    assert [top.token for top in content[0].top_logprobs] == ["A", "B"]


async def test_streamed_chat_logprobs_add_up(client: Client) -> None:
    stream = await client.chat.completions.create(
        model=MODEL.name, messages=HELLO, logprobs=True, stream=True
    )
    spelt = b""
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        for token in (logprobs and logprobs.content) or []:
            spelt += bytes(token.bytes or [])
            assert token.top_logprobs == []
    assert spelt.decode() == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: Client, stream: bool) -> None:
    kwargs = {"model": MODEL.name, "prompt": "ab", "logprobs": 1, "max_tokens": 100}
    found = []
    if stream:
        async for chunk in await client.completions.create(**kwargs, stream=True):
            found.append(chunk.choices[0].logprobs)
    else:
        answer = await client.completions.create(**kwargs)
        found.append(answer.choices[0].logprobs)
    tokens = [token for logprobs in found for token in logprobs.tokens]
    offsets = [offset for logprobs in found for offset in logprobs.text_offset]
    tops = [top for logprobs in found for top in logprobs.top_logprobs]
    text = whole_answer("ab", 0)
    assert tokens[:5] == list("0:ba ")
    assert tokens[5:7] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert offsets == [i for i, c in enumerate(text) for _ in c.encode()]
    assert tops[0] == {"A": -0.5, "0": -0.48}


async def test_token_ids(client: Client) -> None:
    extra = {"return_token_ids": True}
    chat = await client.chat.completions.create(model=MODEL.name, messages=HELLO, extra_body=extra)
    assert chat.prompt_token_ids == list(PROMPT.encode())
    assert bytes(chat.choices[0].token_ids).decode() == ANSWER
    stream = await client.completions.create(
        model=MODEL.name, prompt=["ab", "c"], stream=True, max_tokens=99, extra_body=extra
    )
    prompts, ids = {}, {0: b"", 1: b""}
    async for chunk in stream:
        (choice,) = chunk.choices
        ids[choice.index] += bytes(choice.token_ids)
        if hasattr(choice, "prompt_token_ids"):
            assert choice.index not in prompts
            prompts[choice.index] = bytes(choice.prompt_token_ids)
    assert prompts == {0: b"ab", 1: b"c"}
    assert [ids[0].decode(), ids[1].decode()] == [whole_answer("ab", 0), whole_answer("c", 0)]


async def test_models(client: Client) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == [MODEL.name, ADAPTER.name]
    shown = await client.models.retrieve(MODEL.name)
    assert shown.max_model_len == MODEL.max_model_len
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def test_unknown_model(client: Client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id


async def test_too_long(client: Client) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL.name, messages=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("must hold token ids below 9", "messages must hold token ids below 9"),
        ("prompt has too many tokens", "messages has too many tokens"),
        ("There is no room.", "There is no room."),
    ],
)
async def test_the_field_has_the_clients_name(
    client: Client, frontend: Scripted, said: str, message: str
) -> None:
    frontend.refusal = InvalidArgument(said, field="prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL.name, messages=HELLO)
    assert isinstance(caught.value.body, dict)
    assert (caught.value.body["message"], caught.value.param) == (message, "messages")


async def test_overload_says_when_to_come_back(client: Client, frontend: Scripted) -> None:
    frontend.refusal = Refusal("the queue is full", retry_after_s=1.25, limit=Limit.QUEUE)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model=MODEL.name, messages=HELLO)
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1250")


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        (b"{}", 0),
        (b"no JSON at all", 0),
        (b'{"priority": 5}', -(2**31)),
        (b'{"\\u0070riority": 5}', -(2**31)),
    ],
)
async def test_who_is_turned_away_is_not_read(
    http: httpx.AsyncClient, frontend: Scripted, body: bytes, priority: int
) -> None:
    """As urgent as the body may turn out to be: nothing is kept out that would be let in."""
    frontend.away = Refusal("the queue is full", retry_after_s=1.25, limit=Limit.QUEUE)
    response = await http.post("/v1/completions", content=body)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert frontend.asked == [("", priority)] and frontend.seen == []


async def test_the_client_retries_overload_by_itself(client: Client, frontend: Scripted) -> None:
    frontend.refusal = Overloaded("the queue is full", retry_after_s=0.01)
    with pytest.raises(openai.RateLimitError):
        await client.with_options(max_retries=1).completions.create(model="", prompt="x")
    assert len(frontend.seen) == 2


async def test_one_bad_prompt_of_several_fails_the_call(client: Client, frontend: Scripted) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL.name, prompt=["ab", "x" * 5000])
    assert caught.value.code == "context_length_exceeded"
    assert frontend.open_streams == 0


@pytest.mark.deep
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_after_the_start(client: Client, frontend: Scripted, stream: bool) -> None:
    """As a status while nothing is sent, else as the stream's last event; never cut silently."""
    frontend.failure = InvalidArgument("prompt upset the model", field="prompt")
    texts = []
    with pytest.raises(openai.APIError) as caught:
        answer = await client.chat.completions.create(
            model=MODEL.name, messages=HELLO, stream=stream
        )
        async for chunk in answer:
            texts.append(chunk.choices[0].delta.content)
    assert texts == (["", "0"] if stream else [])
    assert caught.value.param == "messages"
    assert "messages upset the model" in caught.value.message
    assert isinstance(caught.value, openai.BadRequestError) is not stream


@pytest.mark.deep
@pytest.mark.parametrize("stream", [False, True])
async def test_the_text_of_an_unforeseen_failure_stays_here(
    client: Client, frontend: Scripted, stream: bool
) -> None:
    frontend.failure = ZeroDivisionError("secret at 0x7f00")
    with pytest.raises(openai.APIError) as caught:
        answer = await client.chat.completions.create(
            model=MODEL.name, messages=HELLO, stream=stream
        )
        async for _ in answer:
            pass
    assert "secret" not in str(caught.value) and "secret" not in str(caught.value.body)
    assert caught.value.code == "internal_error"


async def test_leaving_a_stream_closes_it(client: Client, frontend: Scripted) -> None:
    frontend.hold = True
    stream = await client.chat.completions.create(model=MODEL.name, messages=HELLO, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert frontend.open_streams == 1
    await stream.close()
    await asyncio.wait_for(frontend.closed.wait(), 120)
    assert frontend.open_streams == 0


async def test_leaving_while_waiting_closes_too(client: Client, frontend: Scripted) -> None:
    frontend.hold = True
    waiting = asyncio.ensure_future(
        client.completions.create(model=MODEL.name, prompt=["ab", "cd"])
    )
    await asyncio.wait_for(frontend.started.wait(), 120)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(120):
        while frontend.open_streams:
            frontend.closed.clear()
            await frontend.closed.wait()


async def test_internal_errors_of_open_are_server_errors(
    client: Client, frontend: Scripted
) -> None:
    frontend.refusal = Internal("internal error")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model=MODEL.name, messages=HELLO)
