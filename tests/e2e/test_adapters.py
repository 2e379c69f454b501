"""Adapters that come and go over HTTP and gRPC while real processes run, with fake steps: tokens
depend on the adapter that each position was computed with, so a mistake changes them."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from batonlm.rpc.errors import from_rpc_error
from batonlm.v1 import adapters_pb2 as pb
from batonlm.v1 import inference_pb2
from batonlm.v1.adapters_pb2_grpc import AdaptersStub
from tests.e2e.relay import (
    PATIENCE_S,
    Answer,
    Relay,
    eventually,
    happens_during,
    options,
    until_it_comes_about,
)

pytestmark = pytest.mark.deep

LONG = 300
PROMPT = list(range(20, 220))


def make(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("french", "legal", "other", "team/sql"):
        make(folder / name, name)
    make(folder.parent / "outside", "outside")
    (folder / "link").symlink_to(folder.parent / "outside")
    return folder


@pytest.fixture(scope="module")
def relay(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    given = make(tmp_path_factory.mktemp("given") / "start", "start")
    running = Relay(
        tmp_path_factory.mktemp("running"),
        *("--runner", "fake", "--prefill", "2", "--decode", "2", "--prefer-split"),
        *("--adapter", f"start={given}", "--adapters-folder", str(shared)),
    )
    yield running
    running.close()


def post(relay: Relay, route: str, **body: Any) -> httpx.Response:
    return relay.client.post(f"/v1/{route}", json=body)


def load(relay: Relay, name: str, path: str, **more: Any) -> None:
    answer = post(relay, "load_lora_adapter", lora_name=name, lora_path=path, **more)
    assert answer.status_code == 200, answer.text
    assert answer.text == f"Success: LoRA adapter '{name}' added successfully."


def unload(relay: Relay, name: str) -> None:
    answer = post(relay, "unload_lora_adapter", lora_name=name)
    assert answer.status_code == 200, answer.text


def listed(relay: Relay) -> dict[str, str | None]:
    """The models by name, each with its parent."""
    found = relay.client.get("/v1/models").json()["data"]
    return {model["id"]: model["parent"] for model in found}


def generate(
    relay: Relay, model: str, max_tokens: int = 24, began: threading.Semaphore | None = None
) -> list[int]:
    """Its tokens. began: released at the first event after it was accepted."""
    request = inference_pb2.GenerateRequest(model=model, options=options(max_tokens=max_tokens))
    request.token_ids.ids.extend(PROMPT)
    answer = Answer()
    for response in relay.stub.Generate(request, timeout=PATIENCE_S):
        answer.take(response.event)
        if began and answer.token_ids:
            began.release()
            began = None
    assert answer.accepted is not None and answer.accepted.model == model
    assert len(answer.token_ids[0]) == max_tokens
    return answer.token_ids[0]


def held(relay: Relay, number: int) -> bool:
    """Whether every worker has so many."""
    workers = relay.processes("prefill") + relay.processes("decode")
    return all(relay.metric(worker, "baton_adapters") == number for worker in workers)


def test_one_is_loaded_used_listed_and_unloaded(relay: Relay) -> None:
    base, start = generate(relay, "baton-tiny"), generate(relay, "start")
    assert base != start
    load(relay, "french", "french")
    # Without a pause: the router knows when the answer comes.
    french = generate(relay, "french")
    assert french not in (base, start)
    client = openai.OpenAI(base_url=f"{relay.http}/v1", api_key="none")
    assert {model.id for model in client.models.list()} == {"baton-tiny", "french", "start"}
    assert listed(relay) == {"baton-tiny": None, "french": "baton-tiny", "start": "baton-tiny"}
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
    answer = client.completions.create(
        model="baton-tiny:french", **body, extra_body={"ignore_eos": True}
    )
    assert answer.model == "french"
    assert relay.metric(relay.router, "baton_adapter_requests_total", adapter="french") >= 2
    unload(relay, "french")
    assert "french" not in listed(relay)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="french", **body)
    assert post(relay, "unload_lora_adapter", lora_name="french").status_code == 404
    assert generate(relay, "start") == start and generate(relay, "baton-tiny") == base
    assert held(relay, 1)


def test_what_must_not_be_loaded_is_refused_everywhere(relay: Relay, shared: Path) -> None:
    load(relay, "legal", str(shared / "legal"))
    load(relay, "legal", "legal")
    bad = {
        "outside by dots": ("x", "../outside"),
        "outside by a link": ("x", "link"),
        "outside": ("x", str(shared.parent / "outside")),
        "the folder itself": ("x", "."),
        "nothing": ("x", ""),
        "nowhere": ("x", "none"),
        "a file": ("x", "legal/adapter_config.json"),
        "no path": ("x", "\0"),
        "long": ("x", "a" * 5000),
        "the model": ("baton-tiny", "legal"),
        "no name": ("", "legal"),
        "a colon": ("baton-tiny:legal", "legal"),
        "another's name": ("legal", "other"),
    }
    for why, (name, path) in bad.items():
        answer = post(relay, "load_lora_adapter", lora_name=name, lora_path=path)
        assert answer.status_code == 400, why
        assert answer.json()["error"]["param"] in ("lora_name", "lora_path"), why
        assert str(shared) not in answer.text, why
    assert post(relay, "load_lora_adapter", lora_name="x").status_code == 400
    legal = generate(relay, "legal")
    load(relay, "legal", "other", load_inplace=True)
    replaced = generate(relay, "legal")
    assert replaced != legal
    load(relay, "third", "other")
    assert generate(relay, "third") == replaced
    unload(relay, "legal")
    assert generate(relay, "third") == replaced
    unload(relay, "third")
    assert held(relay, 1)


def test_the_same_over_grpc(relay: Relay) -> None:
    stub: Any = AdaptersStub(relay.channel)
    answer = stub.LoadAdapter(pb.LoadAdapterRequest(name="team/sql", path="team/sql"))
    assert answer.adapter.name == "team/sql" and answer.adapter.rank == 8
    assert generate(relay, "team/sql")
    with pytest.raises(grpc.RpcError) as caught:
        stub.LoadAdapter(
            pb.LoadAdapterRequest(name="b", path="team/sql", digest="0" * 32), timeout=PATIENCE_S
        )
    assert from_rpc_error(caught.value).field == "name"  # type: ignore[arg-type]
    stub.UnloadAdapter(pb.UnloadAdapterRequest(name="team/sql"))
    assert "team/sql" not in listed(relay)


def test_streams_outlive_the_adapter_that_is_unloaded_and_the_worker_that_is_killed(
    relay: Relay,
) -> None:
    load(relay, "french", "french")
    load(relay, "legal", "legal")
    names = ["french", "legal", "start", "baton-tiny"]
    right = {name: generate(relay, name, LONG) for name in names}

    def killed() -> bool:
        """Whether streams ran on the decode worker that was killed."""
        before = relay.lost_attempts()
        with ThreadPoolExecutor(8) as pool:
            runs = [(name, pool.submit(generate, relay, name, LONG)) for name in names * 2]
            if not happens_during(
                [run for _, run in runs], lambda: sum(relay.running("decode").values()) > 2
            ):
                return False
            victim = relay.busiest("decode")
            relay.kill(victim)
            for name, running in runs:
                assert running.result() == right[name], name
        relay.wait_for_all(gone=victim["pid"])
        # What was loaded at run time is loaded there again, without the operator.
        eventually(lambda: held(relay, 3), PATIENCE_S, "the new worker has all adapters")
        return relay.lost_attempts() > before

    until_it_comes_about(killed, "streams lost their worker")
    with ThreadPoolExecutor(8) as pool:
        # Of each, a token has come: one that still waited for a worker would be refused.
        began = threading.Semaphore(0)
        runs = [(name, pool.submit(generate, relay, name, LONG, began)) for name in names * 2]
        assert all(began.acquire(timeout=PATIENCE_S) for _ in runs)
        unload(relay, "french")
        load(relay, "more", "other")
        for name, running in runs:
            assert running.result() == right[name], name
    unload(relay, "legal")
    unload(relay, "more")
    eventually(lambda: held(relay, 1), PATIENCE_S, "nothing is loaded again")


def test_a_worker_that_was_frozen_while_others_unloaded_follows(relay: Relay) -> None:
    load(relay, "french", "french")
    frozen = relay.processes("decode")[1]
    relay.kill(frozen, signal.SIGSTOP)
    try:
        eventually(
            lambda: (
                relay.metric(relay.router, "baton_workers", role="decode", state="serving") == 1
            ),
            PATIENCE_S,
            "the router misses it",
        )
        unload(relay, "french")
        assert "french" not in listed(relay)
    finally:
        relay.kill(frozen, signal.SIGCONT)
    eventually(lambda: held(relay, 1), PATIENCE_S, "it unloads it, too")
    assert "french" not in listed(relay)


def test_hundreds_come_and_go(relay: Relay, shared: Path) -> None:
    number = 200
    for index in range(number):
        make(shared / f"many/{index}", f"many {index}")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: load(relay, f"many-{i}", f"many/{i}"), range(number)))
        assert len(listed(relay)) == number + 2
        one, two = generate(relay, "many-7"), generate(relay, "many-8")
        assert one != two and generate(relay, "many-7") == one
        answer = post(relay, "completions", model="many-1234567", prompt="a", max_tokens=1)
        assert answer.status_code == 404 and len(answer.text) < 3000
        assert "many-" in json.loads(answer.text)["error"]["message"]
        list(pool.map(lambda i: unload(relay, f"many-{i}"), range(number)))
    shutil.rmtree(shared / "many")
    assert held(relay, 1) and set(listed(relay)) == {"baton-tiny", "start"}
