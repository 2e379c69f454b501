"""`baton doctor cluster`: what an API's answers mean, on answers of clusters that lack something.

A real cluster is asked in `tests/k8s/test_doctor_cluster.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from batonlm.cli import checks, doctor
from batonlm.cli import doctor_cluster as cluster
from batonlm.cli.checks import Finding, Status
from batonlm.cli.doctor_cluster import PRESETS, ApiAnswer, Json
from batonlm.core.errors import InvalidArgument

CPU, TCP, RDMA = PRESETS["cpu"], PRESETS["gpu-tcp"], PRESETS["gpu-rdma"]
REFUSED = ApiAnswer(403, {})


NAMES = {"gpu": "nvidia.com/gpu", "rdma": "rdma/shared"}


def node(name: str = "n", images: tuple[str, ...] = (), **offered: str) -> Json:
    offers = {NAMES.get(key, key): value for key, value in offered.items()}
    return {
        "metadata": {"name": name},
        "status": {"allocatable": offers, "images": [{"names": [image]} for image in images]},
    }


def nodes(*items: Json) -> ApiAnswer:
    return ApiAnswer(200, {"items": list(items)})


def labelled(**labels: str) -> ApiAnswer:
    found = {f"pod-security.kubernetes.io/{key}": value for key, value in labels.items()}
    return ApiAnswer(200, {"metadata": {"name": "ns", "labels": found}})


def status(finding: Finding) -> str:
    """With advice whenever there is something to do, and only then."""
    assert bool(finding.advice) == (finding.status is not Status.OK)
    return finding.status.value


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (ApiAnswer(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.4"}), "ok"),
        (ApiAnswer(200, {"major": "1", "minor": "30+", "gitVersion": "v1.30.1-gke"}), "ok"),
        (ApiAnswer(200, {"major": "1", "minor": "29", "gitVersion": "v1.29.0"}), "fail"),
        (ApiAnswer(401, {}), "fail"),
    ],
)
def test_the_servers_version(answer: ApiAnswer, wanted: str) -> None:
    assert status(cluster.judge_version(answer)) == wanted


@pytest.mark.parametrize(
    ("answer", "preset", "wanted"),
    [
        (labelled(enforce="restricted"), "cpu", "ok"),
        (labelled(enforce="restricted"), "gpu-tcp", "ok"),
        (labelled(enforce="baseline"), "gpu-rdma", "fail"),
        (labelled(enforce="privileged"), "gpu-rdma", "ok"),
        (labelled(warn="restricted"), "gpu-rdma", "ok"),
        (labelled(), "gpu-rdma", "ok"),
        (labelled(enforce="tight"), "cpu", "warn"),
        (ApiAnswer(404, {}), "cpu", "warn"),
        (REFUSED, "cpu", "warn"),
    ],
)
def test_the_namespace(answer: ApiAnswer, preset: str, wanted: str) -> None:
    assert status(cluster.judge_namespace("ns", answer, PRESETS[preset])) == wanted


def test_a_service_account_without_rights_is_told_which() -> None:
    found = cluster.judge_access("r", [("get", True), ("list", False), ("watch", False)])
    assert status(found) == "fail" and "list, watch" in found.detail
    assert status(cluster.judge_access("r", [("get", None)])) == "warn"
    assert status(cluster.judge_access("r", [("get", True)])) == "ok"


def test_gpus_and_rdma_are_missed_where_they_are_needed() -> None:
    bare, full = nodes(node(cpu="8")), nodes(node(), node("m", gpu="8", rdma="2"))
    none_left = nodes(node(gpu="0", rdma="0"))
    for judge, needing in ((cluster.judge_gpus, TCP), (cluster.judge_rdma, RDMA)):
        assert status(judge(bare, CPU)) == "ok"
        assert status(judge(bare, needing)) == "fail"
        assert status(judge(none_left, needing)) == "fail"
        assert status(judge(full, needing)) == "ok"
        assert status(judge(REFUSED, needing)) == "warn"
        assert status(judge(REFUSED, CPU)) == "ok"
    assert cluster.judge_gpus(full, TCP).detail == "8 GPUs on 1 nodes"
    sliced = nodes(
        {"metadata": {"name": "s"}, "status": {"allocatable": {f"{cluster.MIG}1g": "7"}}}
    )
    assert cluster.judge_gpus(sliced, TCP).detail.endswith("slices: nvidia.com/mig-1g")
    assert "rdma/shared" in cluster.judge_rdma(full, RDMA).detail
    assert status(cluster.judge_rdma(bare, TCP)) == "ok"


def test_an_api_that_an_hpa_needs_is_missed() -> None:
    assert status(cluster.judge_metrics_api(ApiAnswer(503, {}))) == "warn"
    assert status(cluster.judge_metrics_api(ApiAnswer(404, {}))) == "warn"
    assert status(cluster.judge_metrics_api(ApiAnswer(200, {}))) == "ok"


def test_extensions_are_named_with_what_needs_them() -> None:
    found = cluster.judge_extensions(["apps", "keda.sh"])
    assert status(found) == "ok"
    there, missing = found.detail.split("; not there")
    assert "KEDA" in there and "Gateway API" in missing and "KEDA" not in missing


def test_images_that_only_some_nodes_have() -> None:
    some = nodes(node(images=("a:1", "b:1")), node("m", images=("a:1",)))
    assert status(cluster.judge_images(["a:1"], some)) == "ok"
    found = cluster.judge_images(["a:1", "b:1"], some)
    assert status(found) == "warn" and "b:1 on 1 of 2 nodes" in found.detail
    assert "a:1" not in found.detail


def test_limits_of_a_pod(tmp_path: Path) -> None:
    assert status(cluster.local_memory_lock(RDMA, 64 << 10)) == "warn"
    assert status(cluster.local_memory_lock(RDMA, -1)) == "ok"
    assert status(cluster.local_memory_lock(TCP, 64 << 10)) == "ok"
    assert status(checks.open_files(1024)) == "warn"
    assert status(checks.open_files(1 << 20)) == "ok"
    assert status(checks.shared_memory(str(tmp_path / "none"))) == "warn"


def test_devices_of_a_pod(tmp_path: Path) -> None:
    assert status(cluster.local_infiniband(RDMA, str(tmp_path))) == "fail"
    assert status(cluster.local_infiniband(TCP, str(tmp_path))) == "ok"
    (tmp_path / "uverbs0").touch()
    assert "uverbs0" in cluster.local_infiniband(RDMA, str(tmp_path)).detail
    assert status(cluster.local_gpu_driver(TCP, str(tmp_path))) == "warn"
    assert status(cluster.local_gpu_driver(CPU, str(tmp_path))) == "ok"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    driver = tmp_path / "proc" / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX  570.86  Release\n")
    assert cluster.local_gpu_driver(TCP, str(tmp_path)).detail == "1 GPUs in this pod, 570.86"


def test_a_name_without_an_address() -> None:
    """There is no cluster's DNS where this runs."""
    assert status(cluster.local_dns(["baton-decode.nowhere.invalid"])) == "fail"


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", "cluster", *argv])


def test_without_a_way_to_a_cluster_it_says_how_to_give_one(tmp_path: Path) -> None:
    for content in (None, "", "clusters: 3", "{}"):
        file = tmp_path / "config"
        if content is not None:
            file.write_text(content)
        with pytest.raises(InvalidArgument) as refused:
            doctor.run(parsed("--kubeconfig", str(file)))
        assert refused.value.field == "kubeconfig"


def test_a_cluster_that_does_not_answer_is_the_one_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server: dict[str, Any] = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    config = {
        "clusters": [server],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    assert doctor.run(parsed("--kubeconfig", str(file), "--json")) == 1
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"]] == ["api"]
    assert "nobody answers" in report["checks"][0]["detail"]
