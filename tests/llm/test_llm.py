"""A model in this process: order, bounds, errors by name, and what ends a call early."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonlm import LLM
from batonlm.cli import precision
from batonlm.client import Answer
from batonlm.core.errors import (
    BatonError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ModelNotFound,
    Unavailable,
)
from batonlm.core.request.request import Message, Request, TokenPrompt
from batonlm.core.scheduler.plan import StepResult
from batonlm.llm.llm import AHEAD, ENCODED_AT_ONCE
from batonlm.testing.fake_runner import FakeRunner

BUNDLED = Path(__file__).parents[2] / "services/batonlm/models/baton-tiny"
RUNNING = 4
"""Sequences at once: few, so that requests wait for each other."""
LIMIT_S = 60.0
"""A bound for liveness."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory_mib=32, max_running=RUNNING, threads=1) as opened:
        yield opened


@pytest.fixture(autouse=True)
def idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, nothing of it stays."""
    yield
    if "llm" in request.fixturenames:
        opened = request.getfixturevalue("llm")
        eventually(lambda: not (opened.load.running_sequences or opened.load.waiting_sequences))


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def endless(llm: LLM) -> Iterator[Request]:
    return itertools.repeat(llm.request([5, 6, 7], max_tokens=4, ignore_eos=True))


def test_answers_come_in_order_whatever_ends_first(llm: LLM) -> None:
    lengths = [1 + 37 * i % 50 for i in range(40)]
    requests = [llm.request([5, 6, 7], max_tokens=n, ignore_eos=True) for n in lengths]
    found = list(llm.answers(requests))
    assert [answer.finished.completion_tokens for answer in found] == lengths


def test_an_iterator_is_read_little_ahead(llm: LLM) -> None:
    drawn = 0

    def requests() -> Iterator[Request]:
        nonlocal drawn
        for request in itertools.islice(endless(llm), 400):
            drawn += 1
            yield request

    ahead = []
    for number, _ in enumerate(llm.answers(requests())):
        ahead.append(drawn - number)
    assert len(ahead) == 400
    # What is unfinished, what is taken at once, and what waits for an earlier answer.
    assert max(ahead) <= 3 * (AHEAD * RUNNING + ENCODED_AT_ONCE)


def test_what_the_iterator_raises_ends_the_call(llm: LLM) -> None:
    def requests() -> Iterator[Request]:
        yield from itertools.islice(endless(llm), 3 * ENCODED_AT_ONCE)
        raise LookupError("no more lines")

    with pytest.raises(LookupError, match="no more lines"):
        list(llm.answers(requests()))


def test_an_iterator_that_is_left_ends_what_runs(llm: LLM) -> None:
    answers = llm.answers(endless(llm))
    next(answers)
    answers.close()  # type: ignore[attr-defined]  # a generator


def test_ctrl_c_ends_the_call_and_the_llm_goes_on(llm: LLM) -> None:
    answered = threading.Event()

    def interrupt() -> None:
        answered.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.answers(endless(llm)):
            answered.set()
    thread.join()
    assert len(llm.generate(["The capital of France is"], max_tokens=3)) == 1


def test_several_threads_share_the_batches(llm: LLM) -> None:
    alone = llm.generate([[5, 6, 7]], max_tokens=30, temperature=0)[0].choices
    found: list[Answer] = []

    def ask() -> None:
        found.extend(llm.generate([[5, 6, 7]] * 20, max_tokens=30, temperature=0))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.choices for answer in found] == [alone] * 60


def test_one_prompt_and_one_conversation_need_no_list(llm: LLM) -> None:
    assert len(llm.generate("Hello", max_tokens=2)) == 1
    one = [{"role": "user", "content": "What is the capital of France?"}]
    as_text, as_list, as_lists = (
        llm.chat(given, max_tokens=20, temperature=0)  # type: ignore[arg-type]
        for given in (one[0]["content"], one, iter([one, [Message("user", "Hello")]]))
    )
    assert len(as_text) == len(as_list) == 1 and len(as_lists) == 2
    assert as_text[0].text == as_list[0].text == as_lists[0].text != ""


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"choice": []}, "choice"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"),
        ({"n": 17}, "n"),
        ({"max_tokens": 1 << 20}, "max_tokens"),
    ],
)
def test_errors_name_the_option_and_the_request(
    llm: LLM, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"request 0, counted from 0") as raised:
        llm.generate(["Hello"], **options)
    assert raised.value.field == name


def test_an_error_ends_the_call_or_takes_an_answers_place(llm: LLM) -> None:
    prompts: Any = ["Hello", "", [1, 5000], [7] * 3000, ["x"], "Hello"]
    with pytest.raises(InvalidArgument, match=r"request 1, counted from 0") as raised:
        llm.generate(prompts, max_tokens=2)
    assert raised.value.field == "prompt"
    found = llm.generate(prompts, max_tokens=2, return_exceptions=True)
    kinds = [type(outcome) for outcome in found]
    assert kinds == [
        *(Answer, InvalidArgument, InvalidArgument),
        *(ContextLengthExceeded, InvalidArgument, Answer),
    ]
    assert {outcome.field for outcome in found if isinstance(outcome, BatonError)} == {"prompt"}
    mixed: Any = iter([{"role": "user", "content": "Hello"}])
    with pytest.raises(InvalidArgument, match="list of messages"):
        llm.chat(mixed)


def test_a_request_for_another_model_is_refused(llm: LLM) -> None:
    with pytest.raises(ModelNotFound, match="baton-tiny"):
        list(llm.answers([Request(TokenPrompt((5,)), model="other")]))


def test_a_deadline_ends_a_request(llm: LLM) -> None:
    late = Request(TokenPrompt((5, 6)), max_tokens=2000, ignore_eos=True, deadline_s=1e-6)
    (outcome, other) = llm.answers(
        [late, Request(TokenPrompt((5, 6)), max_tokens=3)], return_exceptions=True
    )
    assert isinstance(outcome, DeadlineExceeded)
    assert isinstance(other, Answer)


def test_unknown_options_and_models_are_errors(tmp_path: Path) -> None:
    unknown: Any = {"dtpye": "float32"}
    with pytest.raises(TypeError, match="dtpye"):
        LLM(**unknown)
    with pytest.raises(InvalidArgument, match="must be one of") as raised:
        LLM(dtype="float8")
    assert raised.value.field == "dtype"
    with pytest.raises(InvalidArgument, match=r"has no config\.json") as raised:
        LLM(str(tmp_path))
    assert raised.value.field == "model"


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as raised:
        LLM(memory_share=1e-5)
    assert raised.value.field == "memory_share"


@pytest.mark.deep
def test_the_first_precision_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "host_free_bytes", lambda: 36 << 20)
    with LLM(kv_memory_mib=16, threads=1) as llm:
        (answer,) = llm.generate("3 + 4", max_tokens=4, temperature=0, ignore_eos=True)
    assert len(answer.choices[0].token_ids) == 4
    (line,) = (record for record in caplog.records if "insists" in record.message)
    assert line.levelname == "WARNING" and "float32 would take 14" in line.message
    monkeypatch.setattr(precision, "host_free_bytes", lambda: 20 << 20)
    with pytest.raises(InvalidArgument, match="nothing smaller fits") as raised:
        LLM(kv_memory_mib=16)
    assert raised.value.field == "model"


def test_a_prompts_own_log_probabilities(llm: LLM) -> None:
    """As evaluation harnesses ask for them; the numbers are transformers' own."""
    prompts = [tuple(range(5, 5 + length)) for length in (1, 2, 40, 400)]
    network: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    for max_tokens in (0, 3):
        requests = [
            Request(
                TokenPrompt(ids),
                max_tokens=max_tokens,
                prompt_logprobs=2,
                echo=True,
                skip_special_tokens=False,
            )
            for ids in prompts
        ]
        for ids, answer in zip(prompts, llm.answers(requests), strict=True):
            with torch.inference_mode():
                scores = torch.log_softmax(network(torch.tensor([ids])).logits[0, :-1], 1)
            entries = answer.accepted.prompt_logprobs
            assert [entry.token.token_id for entry in entries] == list(ids)
            own = torch.tensor([entry.token.logprob for entry in entries[1:]])
            right = scores.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)
            assert all(len(entry.top) == 2 for entry in entries[1:])
            assert answer.finished.completion_tokens <= max_tokens
            spelled = b"".join(entry.token.text for entry in entries)
            assert answer.accepted.prompt_text == spelled.decode(errors="replace")


def test_the_bar_is_shown_where_it_is_asked_for(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["Hello"] * 3, max_tokens=2, ignore_eos=True)
    assert capsys.readouterr().err == ""
    llm.generate(["Hello"] * 3, max_tokens=2, ignore_eos=True, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "6 tokens" in shown


class BreakingRunner(FakeRunner):
    """Fails in its third step."""

    def collect(self) -> StepResult:
        result = super().collect()
        if result.step == 3:
            raise RuntimeError("the device is gone")
        return result


def test_an_engine_that_fails_ends_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> FakeRunner:
        return BreakingRunner()

    monkeypatch.setattr("batonlm.llm.engine.open_runner", breaks)
    with LLM() as llm:
        with pytest.raises(Internal, match="engine failed") as raised:
            llm.generate([[5, 6, 7]] * 10, max_tokens=50, ignore_eos=True)
        causes: list[BaseException | None] = [raised.value]
        while causes[-1] is not None:
            causes.append(causes[-1].__cause__)
        assert any(isinstance(cause, RuntimeError) for cause in causes)
        with pytest.raises(BatonError):
            llm.generate([[5]])


def test_a_closed_llm_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batonlm.llm.engine.open_runner", lambda *_, **__: FakeRunner())
    llm = LLM()
    begun = threading.Event()
    failures: list[BatonError] = []

    def ask() -> None:
        try:
            for _ in llm.answers(endless(llm)):
                begun.set()
        except BatonError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(LIMIT_S)
    llm.close()
    thread.join(LIMIT_S)
    assert isinstance(failures[0], Unavailable)
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("Hello")
    llm.close()


ALONE = """
import sys
import batonlm
assert not {"torch", "grpc", "transformers"} & sys.modules.keys()
llm = batonlm.LLM(kv_memory_mib=16, threads=1)
print(llm.generate("The capital of France is", max_tokens=8, temperature=0)[0].text)
"""


@pytest.mark.deep
def test_a_program_that_forgets_to_close_it_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " Paris.\n", "")
