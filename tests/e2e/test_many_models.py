"""Two real models behind one router: both answer as `transformers` does, also while one of them
loses its only decode worker, and KV is never handed from one to the other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from batonlm.v1 import inference_pb2
from tests.e2e.relay import (
    PATIENCE_S,
    STARTING_PAUSE_S,
    Answer,
    Relay,
    eventually,
    happens_during,
    options,
    until_it_comes_about,
)
from tests.e2e.test_parity import NEW_TOKENS, expected, prompts
from tests.engine.tiny_models import save_tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.deep

LONG = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of other shapes, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": save_tiny_model("llama", folder / "one"),
        "two": save_tiny_model("qwen3", folder / "two", seed=1),
    }


@pytest.fixture(scope="module")
def relay(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    folder = tmp_path_factory.mktemp("running")
    (folder / "aliases.json").write_text('{"aliases": {"chat": {"models": {"one": 1}}}}')
    running = Relay(
        folder,
        *("--aliases", str(folder / "aliases.json")),
        *("--model", str(folders["one"]), "--model", f"second={folders['two']},prefill=2"),
        *("--kv-memory-mib", "64"),
    )
    yield running
    running.close()


def generate(relay: Relay, model: str, prompt: list[int], max_tokens: int) -> Answer:
    request = inference_pb2.GenerateRequest(model=model, options=options(max_tokens=max_tokens))
    request.token_ids.ids.extend(prompt)
    answer = Answer()
    for response in relay.stub.Generate(request, timeout=PATIENCE_S):
        answer.take(response.event)
    assert answer.accepted is not None and model in ("chat", answer.accepted.model)
    return answer


def test_both_answer_as_transformers_does(relay: Relay, folders: dict[str, Path]) -> None:
    asked = prompts(400)[::2]
    right = {"one": expected(folders["one"], asked), "second": expected(folders["two"], asked)}
    assert right["one"] != right["second"]
    work = [(model, index) for index in range(len(asked)) for model in right]
    with ThreadPoolExecutor(len(work)) as pool:
        found = pool.map(lambda it: generate(relay, it[0], asked[it[1]], NEW_TOKENS), work)
        for (model, index), answer in zip(work, found, strict=True):
            assert answer.token_ids[0] == right[model][index], (model, index)
    assert relay.metric(relay.router, "baton_kv_bytes_total") > 0
    assert relay.metric(relay.router, "baton_retries_total") == 0


def test_all_are_listed_and_the_nearest_is_named(relay: Relay) -> None:
    listed = httpx.get(f"{relay.http}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["one", "second", "chat"]
    body: Any = {"model": "secnd", "prompt": "a", "max_tokens": 1}
    answer = httpx.post(f"{relay.http}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith("Did you mean 'second'?")
    # Both models have the same tokenizer, so one process of each kind serves them.
    models = {
        role: [process["model"] for process in relay.processes(role)]
        for role in ("tokenizer", "prefill", "decode", "detokenizer")
    }
    assert models == {
        "tokenizer": ["one,second"],
        "prefill": ["one", "second", "second"],
        "decode": ["one", "second"],
        "detokenizer": ["one,second"],
    }
    for role in ("prefill", "decode"):
        for model in ("one", "second"):
            serving = relay.metric(relay.router, "baton_model_workers", model=model, role=role)
            assert serving == models[role].count(model)
    (line,) = relay.baton("status", "--json").stdout.splitlines()
    assert json.loads(line)["models"] == ["one", "second"]
    said = relay.baton("chat", "--model", "second", "--max-tokens", "4", "hello")
    assert said.returncode == 0, said.stderr
    shown: dict[str, Any] = {}

    def all_are_read() -> bool:
        nonlocal shown
        shown = json.loads(relay.baton("top", "--json", "--interval", "0.1").stdout)
        return not shown["away"]

    until_it_comes_about(all_are_read, "all processes answer `baton top`")
    assert [(pool["role"], pool["model"], pool["asked"]) for pool in shown["pools"][:5]] == [
        ("router", "", 1),
        ("tokenizer", "one,second", 1),
        ("prefill", "one", 1),
        ("prefill", "second", 2),
        ("decode", "one", 1),
    ]


def test_one_models_workers_die_and_the_others_streams_go_on(
    relay: Relay, folders: dict[str, Path]
) -> None:
    asked = prompts(400)[4:10:2]
    right = {
        "one": expected(folders["one"], asked, LONG),
        "second": expected(folders["two"], asked, LONG),
    }

    def killed() -> bool:
        """Whether streams of the second model ran when its only decode worker was killed."""
        victim = next(each for each in relay.processes("decode") if each["model"] == "second")
        with ThreadPoolExecutor(2 * len(asked)) as pool:
            runs = {
                model: [pool.submit(generate, relay, model, prompt, LONG) for prompt in asked]
                for model in right
            }
            everyone = [run for found in runs.values() for run in found]
            if not happens_during(
                everyone, lambda: relay.running("decode").get(victim["pid"], 0) > 0
            ):
                return False
            relay.kill(victim)
            answers = {model: [run.result() for run in found] for model, found in runs.items()}
        for model, found in answers.items():
            assert [answer.token_ids[0] for answer in found] == right[model], model
        relay.wait_for_all(gone=victim["pid"])
        lost = relay.lost("decode")
        ids = {
            model: {answer.accepted.request_id for answer in found if answer.accepted}
            for model, found in answers.items()
        }
        assert not lost & ids["one"]
        return bool(lost & ids["second"])

    until_it_comes_about(killed, "streams of the second model lost their worker")


def test_a_name_goes_to_another_model_and_back_while_all_runs(relay: Relay) -> None:
    file = Path(relay.environment["XDG_STATE_HOME"]) / "aliases.json"

    def served() -> str:
        accepted = generate(relay, "chat", [5, 6, 7], 1).accepted
        return accepted.model if accepted is not None else ""

    pids = [process["pid"] for process in relay.processes()]
    assert served() == "one"
    for words, model in ((["one=0", "second=1"], "second"), (["--back"], "one")):
        done = relay.baton("route", str(file), "chat", *words)
        assert done.returncode == 0, done.stderr
        eventually(lambda model=model: served() == model, PATIENCE_S, f"{model} is asked")
    file.write_text("{")
    eventually(lambda: "the former aliases stay" in relay.logs(), PATIENCE_S, "it is said")
    assert served() == "one"
    assert pids == [process["pid"] for process in relay.processes()]


def completed(relay: Relay, model: str, text: str) -> dict[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{relay.http}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_small_model_asks_a_large_one_here_or_elsewhere_or_answers_alone(
    relay: Relay, folders: dict[str, Path], tmp_path: Path
) -> None:
    """`relay` is the cluster; the laptop is a Baton of its own, with one model."""
    file, policy = tmp_path / "aliases.json", tmp_path / "policy.json"
    policy.write_text('{"kind": "logprob", "threshold": 2, "tokens": 4}')
    route = ("route", str(file), "auto", "one", "--then", "second", "--policy", str(policy))
    upstream = ("--upstream", str(relay.description["grpc"]))
    assert relay.baton(*route, *upstream).returncode == 0
    text = "the quick brown fox"
    right = {name: completed(relay, name, text)["choices"] for name in ("one", "second")}
    assert right["one"][0]["text"] != right["second"][0]["text"]
    laptop = Relay(
        tmp_path,
        *("--aliases", str(file), "--model", f"one={folders['one']}", "--prefill", "0"),
        *("--kv-memory-mib", "64"),
    )
    try:

        def answers(asked: Relay, model: str) -> None:
            def comes() -> bool:
                answer = completed(asked, "auto", text)
                assert answer["choices"] == right[answer["model"]], "whoever answers is right"
                assert answer["usage"]["completion_tokens"] == 12
                assert ("tried_tokens" in answer["usage"]) == (answer["model"] == "second")
                return bool(answer["model"] == model)

            eventually(comes, PATIENCE_S, f"{model} answers", STARTING_PAUSE_S)

        answers(laptop, "second")
        # The cluster's own file, which its next router begins with.
        margin = tmp_path / "margin.json"
        margin.write_text('{"kind": "margin", "threshold": 2, "tokens": 4}')
        own = Path(relay.environment["XDG_STATE_HOME"]) / "aliases.json"
        own.unlink()
        assert relay.baton("route", str(own), *route[2:-1], str(margin)).returncode == 0
        # Its supervisor starts it again, but not before the laptop was seen without it.
        os.kill(relay.supervisor, signal.SIGSTOP)
        try:
            relay.kill(relay.router)
            answers(laptop, "one")
        finally:
            os.kill(relay.supervisor, signal.SIGCONT)
        answers(laptop, "second")
        # Nothing restarts, and it is sure of everything.
        policy.write_text('{"kind": "logprob", "threshold": 0, "tokens": 4}')
        assert relay.baton(*route, *upstream).returncode == 0
        answers(laptop, "one")
        # Both models at one router.
        answers(relay, "second")
    finally:
        laptop.close()
