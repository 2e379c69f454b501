"""Why pods are not ready, and how workers differ, in the words of `baton doctor cluster`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonlm.cli.checks import Status
from batonlm.cli.doctor_cluster import Json, Where, ask, pods, policy, pools, workers
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


def owner(name: str, wanted: int = 1, made: int = 0, failure: str = "") -> Json:
    conditions = [{"type": "ReplicaFailure", "status": "True", "message": failure}]
    return {
        "metadata": {"name": name},
        "spec": {"replicas": wanted},
        "status": {"replicas": made, "conditions": conditions if failure else []},
    }


def refusal(name: str, message: str, at: str = "1") -> Json:
    return {
        "type": "Warning", "reason": "FailedCreate", "message": message, "lastTimestamp": at,
        "involvedObject": {"kind": "ReplicaSet", "name": name},
    }  # fmt: skip


QUOTA = 'pods "b-decode-1" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4'


@pytest.mark.parametrize(
    ("message", "advised"),
    [
        (QUOTA, "quota"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath', "label"),
        ("something else", "FailedCreate"),
    ],
)
def test_pods_that_the_api_server_refuses_are_seen(message: str, advised: str) -> None:
    """As the Deployment says it, or only an event of what is below it."""
    for owners, events in (
        ([owner("b-decode", failure=message), owner("b-router", made=1)], []),
        ([owner("b-decode"), owner("b-router", made=1)], [refusal("b-decode-5f", message)]),
    ):
        found = pools(owners, events)
        assert found.status is Status.FAIL and "1 of 2: b-decode: " in found.detail
        assert message in found.detail and advised in found.advice
        assert pods([], events, len(owners)).status is Status.FAIL


def test_pools_that_are_full_or_only_slow_are_fine() -> None:
    old = [refusal("b-decode-5f", QUOTA)]
    assert pools([owner("b-decode", made=1)], old).status is Status.OK, "it got its pod since"
    assert pools([owner("b-decode")], [refusal("b-decoder-5f", QUOTA)]).status is Status.OK
    assert pools([owner("b-prefill", wanted=0)], old).status is Status.OK
    assert pools([], old).detail == pods([], []).detail == "none is installed here"


def engine(name: str, network: str = "isolated") -> Json:
    entry = {"name": "BATON_KV_NETWORK", "value": network}
    return {
        "metadata": {"name": name, "labels": {"pool": name}},
        "spec": {"containers": [{"env": [entry]}]},
    }


def restricting(name: str) -> Json:
    return {"spec": {"podSelector": {"matchLabels": {"pool": name}}, "policyTypes": ["Ingress"]}}


def test_isolation_is_believed_only_where_a_probe_was_kept_out() -> None:
    engines, policies = [engine("d")], [restricting("d")]
    kept = policy(engines, policies, {"d": False}, True)
    assert kept.status is Status.OK and "none could be reached" in kept.detail
    let_in = policy(engines, policies, {"d": True}, True)
    assert let_in.status is Status.FAIL and "does not enforce" in let_in.detail
    assert "d at port 50052" in let_in.detail
    for reached, control in (({}, None), ({"d": False}, False), ({"d": False}, None)):
        untried = policy(engines, policies, reached, control)
        assert untried.status is Status.WARN and "was not tried" in untried.detail


def test_isolation_without_a_policy_is_somebody_elses_word() -> None:
    other = [restricting("e")]
    assert policy([engine("d")], other, {"d": True}, True).status is Status.WARN
    assert policy([engine("d", "trusted")], [], {}, None).status is Status.OK
    assert policy([], other, {}, None).status is Status.OK
    egress = [{"spec": {"podSelector": {}, "policyTypes": ["Egress"]}}]
    assert policy([engine("d")], egress, {"d": True}, True).status is Status.WARN
