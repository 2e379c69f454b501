"""The large model of a name is at another Baton: two routers with their own workers, real gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from batonlm.cli.main import main
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, Unavailable
from batonlm.core.request.request import (
    ChatPrompt,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    TextPrompt,
    Tool,
)
from batonlm.core.request.validation import validate
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.cascade import Cascade, Policy, PolicyKind, Upstream
from batonlm.router.api.access import KeyAuthenticator, OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import (
    InferenceServicer,
    chat_from_proto,
    generate_from_proto,
)
from batonlm.router.request import upstream
from batonlm.router.request.upstream import can_forward, message_of
from batonlm.rpc.server import ProcessServer
from batonlm.rpc.tls import Certificates
from batonlm.v1 import inference_pb2 as pb
from tests.rpc.authority import Authority
from tests.services.router.conftest import PATIENCE_S, World, read, until
from tests.services.router.test_cascade import (
    CONFIG,
    SURE,
    UNSURE,
    alone,
    answered,
    ask,
    check,
)
from tests.services.router.test_many_models import workers_of


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time to connect."""
    monkeypatch.setattr(upstream, "CONNECT_S", PATIENCE_S)


LOGPROB = Policy(PolicyKind.LOGPROB, 0.9, tokens=4)


@asynccontextmanager
async def served(
    world: World,
    listen: str = "127.0.0.1:0",
    keys: Path | None = None,
    certificates: Certificates | None = None,
) -> AsyncIterator[str]:
    """The world's router over gRPC. Yields its address."""
    authenticator = (
        OpenAuthenticator() if keys is None else KeyAuthenticator(str(keys), CollectorRegistry())
    )
    server = ProcessServer(
        listen=listen,
        services=[InferenceServicer(world.pipeline, stall_timeout_s=5).service()],
        public=True,
        certificates=certificates,
        interceptors=[KeyInterceptor(authenticator)],
    )
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.fixture
async def cluster() -> AsyncIterator[World]:
    """A Baton with the large model."""
    made = World()
    try:
        workers_of(made, "large", digest="d2", tokenizer="t2")
        await made.run(CONFIG)
        yield made
    finally:
        await made.close()


async def laptop(world: World, address: str, **files: str) -> None:
    """A Baton with the small model, and the large one of another."""
    cascade = Cascade("large", LOGPROB, Upstream(address, **files))
    world.aliases["auto"] = Alias((("small", 1),), cascade=cascade)
    workers_of(world, "small", digest="d1", tokenizer="t1")
    await world.run(CONFIG)


async def test_the_other_baton_answers_what_is_hard_and_the_tenant_pays(
    world: World, cluster: World
) -> None:
    async with served(cluster) as address:
        await laptop(world, address)
        check(await world.ask(ask(SURE)), SURE, "small")
        assert not cluster.decodes[0].starts
        answer = await world.ask(ask(UNSURE, tenant=Tenant("one")))
        check(answer, UNSURE, "large")
        assert answer.finished is not None and answer.finished.tried_tokens > 4
        assert not answer.accepted.prompt_token_ids
        (start,) = cluster.decodes[0].starts
        assert start.sampling.seed == 1
        spent = world.counted("baton_tenant_tokens_total", tenant="one", kind="output")
        tried = answer.finished.tried_tokens - answer.finished.prompt_tokens
        assert spent == len(UNSURE) + 1 + tried
        assert answered(world) == (1, 1)
        await until(world.nothing_left)
        await until(cluster.nothing_left)


@pytest.mark.deep
async def test_an_answer_without_a_limit_is_charged_by_its_length(
    world: World, cluster: World
) -> None:
    """How long it may become is known there only."""
    hard = ask("v" * 500, max_tokens=None, n=8)
    at_once = Policy(PolicyKind.CLASSIFIER, 2.0, weights=(0.0,))
    async with served(cluster) as address:
        await laptop(world, address)
        cascade = Cascade("large", at_once, Upstream(address))
        world.aliases["auto"] = Alias((("small", 1),), cascade=cascade)
        prompt = (await world.ask(hard)).accepted.prompt_tokens
        # Ten seconds' worth is there at first: enough for two prompts, and not for an answer, too,
        # which leaves a debt of half a minute.
        hard = replace(hard, tenant=Tenant("one", tokens_per_minute=6 * (2 * prompt + 100)))
        assert (await world.ask(hard)).texts == dict.fromkeys(range(8), "v" * 500)
        with pytest.raises(BatonError, match="tokens per minute"):
            await world.ask(hard)
        assert answered(world) == (0, 2)
    await until(world.nothing_left)
    await until(cluster.nothing_left)


async def test_all_that_is_asked_arrives(world: World, cluster: World) -> None:
    """And the answer has all of it: choices, log-probabilities, calls."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    request = ask(call, n=2, sampling=SamplingParams(top_logprobs=1), return_token_ids=True)
    assert isinstance(request.prompt, ChatPrompt)
    tools = (Tool("weather", parameters='{"type": "object"}'),)
    request = replace(request, prompt=replace(request.prompt, tools=tools))
    async with served(cluster) as address:
        await laptop(world, address)
        world.aliases["auto"] = Alias(
            (("small", 1),),
            cascade=Cascade("large", replace(LOGPROB, threshold=2.0), Upstream(address)),
        )
        answer = await world.ask(request)
    assert answer.accepted.model == "large" and answer.accepted.prompt_token_ids
    for choice in range(2):
        deltas = [delta for delta in answer.deltas if delta.choice == choice]
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert [call.name for call in calls if call.name] == ["weather"]
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert len(entries) == len(answer.token_ids[choice]) and len(entries[0].top) == 1
    await until(world.nothing_left)
    await until(cluster.nothing_left)


FORWARDED = Request(
    ChatPrompt(ask("x").prompt.messages),  # type: ignore[union-attr]
    model="auto",
    n=3,
    sampling=SamplingParams(0.5, 0.75, 5, 0.25, 1.5, 0.5, -0.5, top_logprobs=2),
    seed=7,
    max_tokens=9,
    min_tokens=2,
    stop_strings=("a", "b"),
    include_stop_string=True,
    ignore_eos=True,
    skip_special_tokens=False,
    priority=3,
)


@pytest.mark.parametrize(
    "request_",
    [
        FORWARDED,
        replace(FORWARDED, prompt=TextPrompt("hello"), seed=None, max_tokens=None),
        *(replace(FORWARDED, grammar=Grammar(kind, "text")) for kind in GrammarKind),
    ],
)
def test_a_message_says_all_of_a_request(request_: Request) -> None:
    assert can_forward(validate(request_))
    message = message_of(request_, "large")
    read = (
        chat_from_proto(message, None)
        if isinstance(message, pb.ChatRequest)
        else generate_from_proto(message, None)
    )
    read = replace(read, sampling=replace(read.sampling, seed=0))
    assert read == replace(request_, model="large", return_token_ids=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 4},
        {"cap_max_tokens": True},
        {"stop_token_ids": (1,)},
        {"prompt": TextPrompt("a", add_special_tokens=False)},
        {"prompt": ChatPrompt(FORWARDED.prompt.messages, template_kwargs='{"a": 1}')},  # type: ignore[union-attr]
        {"prompt": ChatPrompt(FORWARDED.prompt.messages, continue_final_message=True)},  # type: ignore[union-attr]
    ],
)
def test_what_has_no_word_there_stays_here(changed: dict[str, object]) -> None:
    assert not can_forward(replace(FORWARDED, **changed))  # type: ignore[arg-type]


async def test_it_goes_on_alone_while_the_other_is_out_of_reach(
    world: World, cluster: World
) -> None:
    async with AsyncExitStack() as serving:
        address = await serving.enter_async_context(served(cluster))
        await laptop(world, address)
        check(await world.ask(ask(UNSURE)), UNSURE, "large")
        await serving.aclose()
        for _ in range(5):
            check(await world.ask(ask(UNSURE)), UNSURE, "small")
        assert alone(world, "unavailable") == 5
        # It is used again once it is back, without a word from anybody.
        await serving.enter_async_context(served(cluster, address))

        async def again() -> bool:
            return (await world.ask(ask(UNSURE))).accepted.model == "large"

        while not await again():  # noqa: ASYNC110 (a breaker closes)
            await asyncio.sleep(0.05)
        await until(world.nothing_left)
        await until(cluster.nothing_left)


async def test_one_that_takes_connections_and_answers_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        await laptop(world, f"{host}:{port}")
        check(await world.ask(ask(UNSURE)), UNSURE, "small")
        assert alone(world, "unavailable") == 1
    await until(world.nothing_left)


async def test_a_key_comes_from_a_file(
    world: World,
    cluster: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "KEY_S", 0.0)
    keys, key = tmp_path / "keys.json", tmp_path / "key"
    key.write_text("baton-no-such-key\n")
    assert main(["keys", "new", "--tenant", "laptop", str(keys)]) == 0
    async with served(cluster, keys=keys) as address:
        await laptop(world, address, key_file=str(key))
        check(await world.ask(ask(UNSURE)), UNSURE, "small")
        assert alone(world, "unauthenticated") == 1
        key.write_text(capsys.readouterr().out.strip() + "\n")
        check(await world.ask(ask(UNSURE)), UNSURE, "large")
        key.unlink()
        check(await world.ask(ask(UNSURE)), UNSURE, "small")


@asynccontextmanager
async def running(world: World, cluster: World) -> AsyncIterator[None]:
    """One answer of the cluster is on its way, and another one has not begun yet."""
    (worker,) = cluster.decodes
    worker.last_position = 5
    stream = await world.pipeline.open(ask(UNSURE))
    waiting = asyncio.create_task(world.ask(ask(UNSURE)))
    await until(lambda: len(worker.holds()) == 2)
    yield
    worker.last_position = None
    check(await read(stream), UNSURE, "large")
    check(await waiting, UNSURE, "large")


async def test_a_ca_that_its_file_gets_counts_and_answers_go_on(
    world: World, cluster: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "KEY_S", 0.0)
    files = Authority(tmp_path).host("its", "127.0.0.1")
    strange = Authority(tmp_path / "strange").host("its", "127.0.0.1").ca.read_bytes()
    its, ca = files.ca.read_bytes(), tmp_path / "ca.pem"
    certificates = Certificates(str(files.cert), str(files.key))
    async with served(cluster, certificates=certificates) as address:
        ca.write_bytes(strange)
        await laptop(world, address, ca_file=str(ca))
        check(await world.ask(ask(UNSURE)), UNSURE, "small")
        ca.write_bytes(its)
        async with running(world, cluster):
            ca.write_bytes(strange)
            check(await world.ask(ask(UNSURE)), UNSURE, "small")
    await until(world.nothing_left)
    await until(cluster.nothing_left)


async def test_answers_go_on_of_an_upstream_that_makes_room_for_others(
    world: World, cluster: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MAX_UPSTREAMS", 1)
    monkeypatch.setattr(upstream, "KEY_S", 0.0)
    async with served(cluster) as address:
        await laptop(world, address)
        async with running(world, cluster):
            for other in ("127.0.0.1:1", "127.0.0.1:2"):
                cascade = Cascade("large", LOGPROB, Upstream(other))
                world.aliases["auto"] = Alias((("small", 1),), cascade=cascade)
                check(await world.ask(ask(UNSURE)), UNSURE, "small")
    await until(world.nothing_left)
    await until(cluster.nothing_left)


async def test_a_key_that_is_refused_is_not_its_clients(
    world: World, cluster: World, tmp_path: Path
) -> None:
    """Where there is no small model either, clients are told that, and not that their key is
    wrong."""
    keys, key = tmp_path / "keys.json", tmp_path / "key"
    key.write_text("baton-no-such-key\n")
    assert main(["keys", "new", "--tenant", "laptop", str(keys)]) == 0
    async with served(cluster, keys=keys) as address:
        workers_of(world, "small", digest="d1", tokenizer="t1")
        world.aliases["auto"] = Alias(
            (("small", 1),),
            cascade=Cascade("large", LOGPROB, Upstream(address, key_file=str(key))),
        )
        await world.run(replace(CONFIG, wait_timeout_s=0.2))
        await world.decodes[0].kill()
        await until(lambda: world.met()["decode"] == 0)
        with pytest.raises(Unavailable):
            await world.ask(ask(UNSURE))
    await until(world.nothing_left)


@pytest.mark.parametrize("closes", [True, False], ids=["its client", "its router"])
async def test_an_answer_that_is_given_up_ends_there_too(
    world: World, cluster: World, closes: bool
) -> None:
    async with served(cluster) as address:
        await laptop(world, address)
        large = cluster.decodes[0]
        large.last_position = 20
        long = ask("v" * 60)
        stream = await world.pipeline.open(long)
        await anext(stream)
        assert large.holds() and world.pipeline.num_requests == 1
        if closes:
            await stream.aclose()
        else:
            world.pipeline.cut()
            with pytest.raises(BatonError, match="leaving"):
                while True:
                    await anext(stream)
        await stream.aclose()
        await until(cluster.nothing_left)
        await until(world.nothing_left)


async def test_an_answer_that_breaks_off_is_an_error(world: World, cluster: World) -> None:
    async with AsyncExitStack() as serving:
        address = await serving.enter_async_context(served(cluster))
        await laptop(world, address)
        cluster.decodes[0].last_position = 20
        stream = await world.pipeline.open(ask("v" * 60))
        await anext(stream)
        await serving.aclose()
        with pytest.raises(BatonError):
            while True:
                await anext(stream)
        await stream.aclose()
        await until(world.nothing_left)
        await until(cluster.nothing_left)
