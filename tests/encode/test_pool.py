"""A router over real encode workers: HTTP, gRPC, Connect, quotas, deaths, clients that go."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from batonlm.client import AsyncClient, Client, InvalidArgument, Ranked, Scores, Vectors
from batonlm.core.admission.admission import Admission, AdmissionLimits, Ask, FleetState
from batonlm.core.admission.fair_queue import DrainRate, FairQueue
from batonlm.core.admission.tenant_budgets import Refusal
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import Unavailable
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.request.request import Request, VectorInput, VectorPrompt
from batonlm.core.routing.load import WorkerDescription, WorkerLoad, WorkerState
from batonlm.encode.model import EncoderModel, Sequences
from batonlm.encode.service import EncodeServicer, ModelThread
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp
from batonlm.router.api.http.server import serve_http
from batonlm.router.config import RouterConfig
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.discovery import StaticDiscovery
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.channels import Channels
from batonlm.rpc.server import Probes, ProcessServer, Service
from batonlm.rpc.worker import worker_service
from batonlm.v1 import inference_pb2 as pb
from batonlm.v1.encode_pb2_grpc import add_EncodeServicer_to_server
from batonlm.v1.inference_pb2_grpc import InferenceStub
from tests.encode.models import QUERY, SIZE, TEXTS, saved
from tests.services.router.conftest import until

PATIENCE_S = 120.0
EXECUTOR = ThreadPoolExecutor(1, "model")
"""One for all models of the tests: they are small, and one event loop runs at a time."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EncoderModel]:
    root = tmp_path_factory.mktemp("encode")
    return {
        name: EncoderModel(
            saved(name, root / name), "", dtype="auto", device="cpu", progress=lambda a, b: None
        )
        for name in ("bert-cls", "bert-cross")
    }


@dataclass
class Worker:
    """A real encode worker in this process."""

    model: EncoderModel
    name: str
    server: ProcessServer | None = None
    servicer: EncodeServicer | None = None

    async def start(self) -> str:
        thread = ModelThread(EXECUTOR, self.model)
        servicer = self.servicer = EncodeServicer(self.model, thread, EXECUTOR)
        identity = WorkerIdentity("encode", self.name * 32, "")
        described = WorkerDescription(identity, self.model.description, max_sequences=4)
        self.server = ProcessServer(
            listen="127.0.0.1:0",
            services=[
                Service(
                    "baton.v1.Encode",
                    lambda server: add_EncodeServicer_to_server(servicer, server),
                ),
                worker_service(lambda: described, lambda: WorkerLoad(WorkerState.SERVING)),
            ],
            probes=Probes(),
        )
        return await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)


@dataclass
class Baton:
    pipeline: Pipeline
    http: httpx.AsyncClient
    grpc: Any
    """An InferenceStub, whose types are those of blocking calls."""
    address: str
    """Of the gRPC port."""
    workers: list[Worker] = field(default_factory=list)

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def error(self, path: str, **body: Any) -> tuple[int, str]:
        answer = await self.http.post(path, json=body)
        return answer.status_code, answer.json()["error"]["message"]


@asynccontextmanager
async def running(*workers: Worker, config: RouterConfig | None = None) -> AsyncIterator[Baton]:
    config = config or RouterConfig()
    async with AsyncExitStack() as ends:
        addresses = [await worker.start() for worker in workers]
        for worker in workers:
            ends.push_async_callback(worker.stop)
        channels = Channels()
        ends.push_async_callback(channels.close)
        router = WorkerIdentity("router", "r" * 32, "")
        fleet = Fleet(StaticDiscovery({"encode": addresses}), channels, router)
        ends.push_async_callback(fleet.close)
        registry = CollectorRegistry()
        pipeline = Pipeline(fleet, config, RouterMetrics(registry))
        ends.push_async_callback(pipeline.close)
        fleet.start()
        await until(lambda: len(fleet.encodes.snapshots()) == len(workers))
        app = HttpApp(pipeline, registry, HttpAccess(OpenAuthenticator()))
        http = await serve_http(app, "127.0.0.1:0")
        ends.push_async_callback(http.close)
        server = ProcessServer(
            listen="127.0.0.1:0",
            services=[InferenceServicer(pipeline, stall_timeout_s=60.0).service()],
            probes=Probes(),
            public=True,
            interceptors=[KeyInterceptor(OpenAuthenticator())],
        )
        address = await server.start()
        ends.push_async_callback(server.stop, 0)
        client = await ends.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{http.address}", timeout=120, trust_env=False)
        )
        channel = await ends.enter_async_context(grpc.aio.insecure_channel(address))
        yield Baton(pipeline, client, InferenceStub(channel), address, [*workers])
        await until(lambda: not pipeline.num_requests and not any(pipeline.held.values()))
        await until(lambda: not any(w.servicer and w.servicer.inputs.num for w in workers))


def alone(model: EncoderModel, *inputs: VectorInput) -> list[list[float]]:
    made = [each for each in model.tokenize(inputs, None) if isinstance(each, Sequences)]
    return [next(model.compute([each], 1))[1][0].tolist() for each in made]


def near(found: Any, expected: Any) -> Any:
    return found == pytest.approx(expected, abs=2e-5)


async def test_vectors_over_http_grpc_and_connect(models: dict[str, EncoderModel]) -> None:
    bert = models["bert-cls"]
    texts = [text[:20] for text in TEXTS]
    expected = alone(bert, *texts)
    async with running(Worker(bert, "a"), Worker(models["bert-cross"], "b")) as baton:
        answer = await baton.post("/v1/embeddings", input=texts, model="bert-cls")
        assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
        for each, vector in zip(answer["data"], expected, strict=True):
            assert near(each["embedding"], vector)
        one = await baton.post("/embeddings", input=texts[0], encoding_format="base64")
        raw = base64.b64decode(one["data"][0]["embedding"])
        assert near(struct.unpack(f"<{SIZE}f", raw), expected[0])
        (made,) = bert.tokenize([texts[0]], None)
        assert isinstance(made, Sequences)
        ids = list(made.ids)
        assert one["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
        by_ids = await baton.post("/v1/embeddings", input=ids)
        assert near(by_ids["data"][0]["embedding"], expected[0])
        inputs = [pb.EmbedInput(text=text) for text in texts]
        message = await baton.grpc.Embed(pb.EmbedRequest(inputs=inputs), timeout=60)
        assert [
            near(list(each.values), v) for each, v in zip(message.vectors, expected, strict=True)
        ]
        connect = await baton.post("/baton.v1.Inference/Embed", inputs=[{"text": texts[0]}])
        assert near(connect["vectors"][0]["values"], expected[0])
        listed = await baton.http.get("/v1/models")
        tasks = {each["id"]: each["task"] for each in listed.json()["data"]}
        assert tasks == {"bert-cls": "embed", "bert-cross": "score"}


async def test_many_texts_keep_their_order(models: dict[str, EncoderModel]) -> None:
    bert = models["bert-cls"]
    texts = [f"{number} {'x' * (number % 9)}" for number in range(300)]
    expected = alone(bert, *texts)
    async with running(Worker(bert, "a"), Worker(bert, "c")) as baton:
        answer = await baton.post("/v1/embeddings", input=texts, dimensions=SIZE)
        for each, vector in zip(answer["data"], expected, strict=True):
            assert near(each["embedding"], vector)


async def test_rankings_and_scores(models: dict[str, EncoderModel]) -> None:
    async with running(Worker(models["bert-cls"], "a"), Worker(models["bert-cross"], "b")) as baton:
        documents = [text[:20] for text in TEXTS]
        scored = await baton.post("/score", text_1=QUERY, text_2=documents)
        scores = [each["score"] for each in scored["data"]]
        assert all(0 < score < 1 for score in scores)
        ranked = await baton.post("/v1/rerank", query=QUERY, documents=documents, top_n=4)
        order = sorted(range(len(documents)), key=lambda index: -scores[index])[:4]
        assert [each["index"] for each in ranked["results"]] == order
        assert [each["document"]["text"] for each in ranked["results"]] == [
            documents[index] for index in order
        ]
        bare = await baton.post(
            "/rerank", query=QUERY, documents=[{"text": "a"}], return_documents=False
        )
        assert bare["results"][0].keys() == {"index", "relevance_score"}
        message = await baton.grpc.Score(
            pb.ScoreRequest(query=QUERY, documents=documents), timeout=60
        )
        assert near(list(message.scores), scores)
        # A model of vectors scores by their cosine, each side with its prompt.
        query, *others = alone(models["bert-cls"], "search: fox", "text: fox", "text: dog")
        cosines = [sum(a * b for a, b in zip(query, other, strict=True)) for other in others]
        found = await baton.post("/score", model="bert-cls", text_1="fox", text_2=["fox", "dog"])
        assert near([each["score"] for each in found["data"]], cosines)


async def test_clients_of_both_kinds_get_vectors_and_rankings(
    models: dict[str, EncoderModel],
) -> None:
    bert = models["bert-cls"]
    documents = [text[:20] for text in TEXTS]
    expected = alone(bert, *documents)
    (made,) = bert.tokenize(documents[:1], None)
    assert isinstance(made, Sequences)

    def ask(address: str) -> tuple[Vectors, Vectors, Scores, list[Ranked]]:
        with Client(address) as client:
            with pytest.raises(InvalidArgument, match="dimensions must be"):
                client.embed("a", dimensions=10**6)
            for wrong, body in (("inputs", [5]), ("documents", "a"), ("documents", [5])):
                with pytest.raises(InvalidArgument) as refused:
                    call: Any = client.embed if wrong == "inputs" else partial(client.score, QUERY)
                    call(body)
                assert refused.value.field == wrong
            return (
                client.embed(documents),
                client.embed([list(made.ids), documents[1]], model="bert-cls", dimensions=8),
                client.score(QUERY, documents),
                client.rerank(QUERY, documents, top_n=3),
            )

    async with running(Worker(bert, "a"), Worker(models["bert-cross"], "b")) as baton:
        found, short, scores, best = await asyncio.to_thread(ask, baton.address)
        assert found.model == "bert-cls" and found.request_id and found.prompt_tokens > 0
        for vector, right in zip(found.vectors, expected, strict=True):
            assert near(list(vector), right)
        assert [len(vector) for vector in short.vectors] == [8, 8]
        order = sorted(range(len(documents)), key=lambda index: -scores.scores[index])
        assert [each.index for each in best] == order[:3]
        assert [each.document for each in best] == [documents[index] for index in order[:3]]
        async with AsyncClient(baton.address) as client:
            again = await client.embed(documents[0], truncate_tokens=-1)
            assert near(list(again.vectors[0]), expected[0])
            assert near((await client.score(QUERY, documents)).scores, scores.scores)
            ranking = await client.rerank(QUERY, documents, top_n=3)
            assert [each.index for each in ranking] == order[:3]


async def test_errors_name_the_input(models: dict[str, EncoderModel]) -> None:
    async with running(Worker(models["bert-cls"], "a"), Worker(models["bert-cross"], "b")) as baton:
        long = "x " * 90
        assert await baton.error("/v1/embeddings", input=["a", long]) == (
            400, "input[1] has 182 tokens, and may have 32",
        )  # fmt: skip
        await baton.post("/v1/embeddings", input=["a", long], truncate_prompt_tokens=-1)
        await baton.post("/v1/embeddings", input=["a", long], truncate=True)
        embed = "/v1/embeddings"
        for status, words, path, body in (
            (400, "input must not be empty", embed, {"input": []}),
            (400, "input must not have an empty entry", embed, {"input": ["a", ""]}),
            (400, "input has a token that", embed, {"input": [5, 10**6]}),
            (400, "input must be a text", embed, {"input": [5, "a"]}),
            (400, "dimensions must be at most 32", embed, {"input": "a", "dimensions": 33}),
            (400, "input_type is not", embed, {"input": "a", "input_type": "query"}),
            (400, "prompt_name is no prompt", embed, {"input": "a", "prompt_name": "b"}),
            (404, "no model 'bert-cross'", embed, {"input": "a", "model": "bert-cross"}),
            (400, "query must not be empty", "/v1/rerank", {"query": "", "documents": ["a"]}),
            (400, "documents must not be empty", "/v1/rerank", {"query": "a", "documents": []}),
            (400, "top_n must be", "/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}),
            (400, "documents[0] has", "/v1/rerank", {"query": "a", "documents": [long]}),
            (400, "text_1 must be one text", "/score", {"text_1": ["a", "b"], "text_2": ["a"]}),
        ):  # fmt: skip
            found, message = await baton.error(path, **body)
            assert (found, words in message) == (status, True), (path, body, message)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await baton.grpc.Embed(pb.EmbedRequest(), timeout=60)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_encode_workers_it_is_said_at_once() -> None:
    async with running() as baton:
        status, message = await baton.error("/v1/embeddings", input="a")
        assert (status, message) == (
            404, "This server has no encode workers: it makes no vectors or scores.",
        )  # fmt: skip


def asked(tenant: Tenant, *texts: str) -> Request:
    return Request(VectorPrompt(texts)).of(tenant)


async def test_a_request_is_remembered_with_its_tokens(models: dict[str, EncoderModel]) -> None:
    async with running(Worker(models["bert-cls"], "a")) as baton:
        found = await baton.pipeline.vectors(asked(Tenant("t"), "xxxxxxxx " * 3))
        assert found.num_tokens == 29
        record = baton.pipeline.explain(found.request_id, Tenant("t"))
        assert (record.asked, record.prompt_tokens, record.model) == ("vectors", 29, "bert-cls")


def test_tokens_are_charged_as_they_were_computed() -> None:
    """A token's share of a second comes back each second; ten of them are there at first."""
    tenant = Tenant("t", tokens_per_minute=60)
    queue = FairQueue[Any](max_tokens=100, max_entries=10)
    limits = AdmissionLimits(max_requests=10, max_tokens=0, max_queue_s=10.0)
    admission = Admission(limits, queue, DrainRate(), jitter=lambda: 0.0)
    ask = Ask(tenant, 0, 0, least_tokens=1, most_tokens=40, longest_output=0, encodes=True)
    fleet = FleetState()
    charge = admission.open(ask, admission.receive(tenant, 24, fleet, 0.0), fleet, 60.0, 0.0)
    assert admission.tokens.total == 10, "as estimated"
    charge.encoding()
    charge.encoded(29)
    charge.release(0, 0.0, finished=True)
    assert admission.tokens.total == admission.input_bytes.total == 0
    with pytest.raises(Refusal):
        admission.receive(tenant, 1, fleet, 18.0)
    admission.receive(tenant, 1, fleet, 20.0).release()
    # What failed before it was computed costs nothing.
    charge = admission.open(ask, admission.receive(tenant, 24, fleet, 60.0), fleet, 60.0, 60.0)
    charge.release(0, 60.0)
    admission.receive(tenant, 1, fleet, 60.0).release()


async def test_when_a_worker_dies_another_one_takes_over(models: dict[str, EncoderModel]) -> None:
    workers = [Worker(models["bert-cls"], name) for name in "ac"]
    async with running(*workers) as baton:
        texts = [f"text {number}" for number in range(400)]
        expected = alone(models["bert-cls"], *texts)
        may_compute = threading.Event()
        held = EXECUTOR.submit(may_compute.wait, PATIENCE_S)
        asking = asyncio.create_task(baton.pipeline.vectors(asked(Tenant(), *texts)))
        first = workers[0].servicer
        assert first is not None
        try:
            await until(lambda: first.inputs.num > 0)
            await workers[0].stop()
        finally:
            may_compute.set()
        assert held.result()
        found = await asking
        for numbers, vector in zip(found.numbers, expected, strict=True):
            assert near(struct.unpack(f"<{SIZE}f", numbers), vector)


async def test_a_client_that_goes_leaves_nothing(models: dict[str, EncoderModel]) -> None:
    worker = Worker(models["bert-cls"], "a")
    async with running(worker) as baton:
        texts = [f"text {number}" for number in range(2000)]
        asking = asyncio.create_task(baton.pipeline.vectors(asked(Tenant(), *texts)))
        servicer = worker.servicer
        assert servicer is not None
        await until(lambda: servicer.inputs.num > 0)
        asking.cancel()
        await asyncio.wait([asking])
        assert baton.pipeline.num_requests == 0
        # `running` checks that worker and router hold nothing.


async def test_a_router_that_leaves_ends_what_waits(models: dict[str, EncoderModel]) -> None:
    async with running(Worker(models["bert-cls"], "a")) as baton:
        texts = [f"text {number}" for number in range(2000)]
        asking = asyncio.create_task(baton.pipeline.vectors(asked(Tenant(), *texts)))
        await until(lambda: baton.pipeline.num_requests == 1)
        baton.pipeline.cut()
        with pytest.raises(Unavailable):
            await asking


async def test_a_drain_waits_for_what_is_accepted(models: dict[str, EncoderModel]) -> None:
    worker = Worker(models["bert-cls"], "a")
    async with running(worker) as baton:
        texts = [f"text {number}" for number in range(200)]
        asking = asyncio.create_task(baton.pipeline.vectors(asked(Tenant(), *texts)))
        servicer = worker.servicer
        assert servicer is not None
        await until(lambda: servicer.inputs.num > 0)
        await servicer.inputs.drain()
        assert servicer.inputs.num == 0
        assert len((await asking).numbers) == 200


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    from batonlm.engine.checkpoint import UnsupportedModel

    with pytest.raises(UnsupportedModel, match="no safetensors"):
        EncoderModel(tmp_path, "", dtype="auto", device="cpu", progress=lambda a, b: None)
