"""Why pods are not ready, and how workers differ, in the words of `baton doctor cluster`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonlm.cli.checks import Status
from batonlm.cli.doctor_cluster import Json, Where, ask, pods, workers
from batonlm.core.request.model import KvLayout, ModelDescription, WorkerIdentity
from batonlm.core.routing.load import WorkerDescription
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedTokenizer

MODEL = ModelDescription("m", "d1" * 16, 1000, 100, (2,), tokenizer_digest="t1" * 16)
LAYOUT = KvLayout("d1" * 16, "float32", 2, 1, 8, 8)
DECODE = WorkerDescription(WorkerIdentity("decode", "a" * 32, ""), MODEL, LAYOUT)


def pod(name: str = "p", *, ready: bool = False, **container: Any) -> Json:
    conditions = [{"type": "Ready", "status": str(ready)}]
    statuses = [{"name": "c", "restartCount": 0, **container}]
    return {
        "metadata": {"name": name},
        "status": {"phase": "Running", "conditions": conditions, "containerStatuses": statuses},
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"lastState": {"terminated": {"exitCode": code, "reason": reason}}}


def warning(reason: str, message: str, name: str = "p", at: str = "1") -> Json:
    about = {"kind": "Pod", "name": name}
    return {
        "type": "Warning", "reason": reason, "message": message, "involvedObject": about,
        "lastTimestamp": at,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "said", "advised"),
    [
        (pod(**waiting("ImagePullBackOff", "no such image")), "no such image", "imagePullSecrets"),
        (pod(**waiting("CreateContainerConfigError", "secret x")), "secret x", "Secret"),
        (pod(**waiting("CrashLoopBackOff"), **ended(2)), "a wrong configuration", "kubectl"),
        (pod(**ended(137, "OOMKilled")), "OOMKilled", "memory limit"),
        (pod(**ended(1)), "crashed", "kubectl"),
        (pod(), "phase Running", "kubectl"),
    ],
)
def test_why_a_pod_is_not_ready(one: Json, said: str, advised: str) -> None:
    found = pods([one, pod("q", ready=True)], [])
    assert found.status is Status.FAIL
    assert "1 of 2 are not ready: p: " in found.detail and said in found.detail
    assert advised in found.advice


def test_a_pod_without_a_node_says_what_the_scheduler_says() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    condition["message"] = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    one = {"metadata": {"name": "p"}, "status": {"phase": "Pending", "conditions": [condition]}}
    found = pods([one], [])
    assert "Insufficient nvidia.com/gpu" in found.detail and "scheduler" in found.advice


def test_the_newest_event_of_a_failed_probe_counts() -> None:
    events = [
        warning("Unhealthy", "Startup probe failed: now", at="2"),
        warning("Unhealthy", "Startup probe failed: before", at="1"),
        warning("Unhealthy", "of another", name="q", at="3"),
    ]
    found = pods([pod()], events)
    assert "failed: now" in found.detail and "before" not in found.detail
    assert "another" not in found.detail


def test_pods_that_are_ready_ended_or_leaving_are_fine() -> None:
    leaving, done = pod("l"), pod("d")
    leaving["metadata"]["deletionTimestamp"] = "now"
    done["status"]["phase"] = "Succeeded"
    assert pods([pod(ready=True), leaving, done], []).status is Status.OK
    assert pods([], []).status is Status.OK
    again = pods([pod(ready=True, restartCount=3, **ended(137, "OOMKilled"))], [])
    assert again.status is Status.WARN and "p 3 times" in again.detail
    assert "OOMKilled" in again.advice


def test_workers_that_are_the_same() -> None:
    found = workers({"a": DECODE, "b": DECODE})
    assert found.status is Status.OK
    assert workers({}).status is Status.OK
    assert workers({"a": None}).status is Status.WARN
    assert "b" in workers({"a": DECODE, "b": None}).detail


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            replace(DECODE, layout=replace(LAYOUT, min_wire_version=2, max_wire_version=3)),
            "wire versions: 1-1 against 2-3",
        ),
        (replace(DECODE, layout=replace(LAYOUT, dtype="bfloat16")), "dtype: float32 against"),
        (
            replace(
                DECODE,
                model=replace(MODEL, digest="d2" * 16),
                layout=replace(LAYOUT, model_digest="d2" * 16),
            ),
            "model d1d1d1d1d1d1 on a against d2d2d2d2d2d2 on b, c",
        ),
        (replace(DECODE, model=replace(MODEL, tokenizer_digest="t2" * 16)), "tokenizer t1t1t1t1"),
    ],
)
def test_workers_that_differ(other: WorkerDescription, said: str) -> None:
    found = workers({"a": DECODE, "b": other, "c": other, "d": None})
    assert found.status is Status.WARN and said in found.detail
    assert found.detail.count("against") == 1, "each difference once"


async def test_workers_are_asked_and_one_that_is_not_there_is_no_fault() -> None:
    worker = ScriptedTokenizer()
    try:
        here = Where("t", "tokenizer", await worker.start())
        told = await ask([here, Where("gone", "decode", "127.0.0.1:1")])
    finally:
        await worker.kill()
    assert told["gone"] is None
    described = told["t"]
    assert described is not None and described.model == language.MODEL
