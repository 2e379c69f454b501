"""deploy/k8s makes what the chart makes: its base is the chart's, and overlays equal presets.

A real API server takes it. No pod has to run for this.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gen_manifests as generator
from tests.k8s.charts import CHART, COMPONENTS, ENGINES, environment, of_kind, pods, render, stack
from tests.k8s.cluster import Cluster

pytestmark = pytest.mark.k8s

K8S = generator.ROOT / "deploy/k8s"
OVERLAYS = {
    "cpu": (),
    "gpu-rdma": ("model.hub.id=Qwen/Qwen3-8B", "auth.keysSecret=baton-keys"),
    "gpu-70b": ("model.hub.id=Qwen/Qwen3-8B", "auth.keysSecret=baton-keys"),
}
"""What each one's preset leaves to the user, and its settings.yaml says."""
TIMEOUT_S = 120.0

Json = dict[str, Any]

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def kustomize(folder: Path) -> list[Json]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def sorted_by_name(value: Any) -> Any:
    """Lists of named things have no order of their own, and an empty key says nothing."""
    if isinstance(value, dict):
        return {key: sorted_by_name(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        parts = [sorted_by_name(each) for each in value]
        if all(isinstance(each, dict) and "name" in each for each in parts):
            return sorted(parts, key=lambda each: (each["name"], each.get("mountPath", "")))
        return parts
    return value


def comparable(objects: list[Json]) -> dict[tuple[str, str], Json]:
    return {
        (each["kind"], each["metadata"]["name"]): sorted_by_name(each)
        for each in generator.plain(objects)
    }


def test_the_base_is_what_the_chart_makes() -> None:
    assert not generator.differing(generator.make(generator.render()), generator.BASE)


@every_overlay
def test_an_overlay_is_what_its_preset_makes(overlay: str) -> None:
    ours = comparable(kustomize(K8S / "overlays" / overlay))
    files = stack(CHART / f"values-{overlay}.yaml")
    charts = comparable(render(*files, sets=OVERLAYS[overlay], release=generator.RELEASE))
    assert set(ours) == set(charts)
    for name, each in charts.items():
        assert ours[name] == each, name


@every_overlay
def test_everything_is_in_the_overlays_namespace(overlay: str) -> None:
    objects = kustomize(K8S / "overlays" / overlay)
    assert {each["metadata"].get("namespace") for each in objects} == {"baton"}
    binding = of_kind(objects, "RoleBinding")["router"]
    assert binding["subjects"][0]["namespace"] == "baton"


@every_overlay
def test_a_variable_stands_before_those_that_use_it(overlay: str) -> None:
    for pod in pods(kustomize(K8S / "overlays" / overlay)).values():
        entries = pod["containers"][0]["env"]
        names = [entry["name"] for entry in entries]
        using = [each["name"] for each in entries if "$(POD_IP)" in each.get("value", "")]
        assert all(names.index("POD_IP") < names.index(name) for name in using)


def test_what_is_yours_is_said_once(tmp_path: Path) -> None:
    settings = yaml.safe_load((K8S / "overlays/gpu-rdma/settings.yaml").read_text())
    settings["data"] = {
        "model": "some/model",
        "folder": "/models/some--model",
        "tokenizerFolder": "/models/some--model.tokenizer",
        "keysSecret": "other-keys",
        "network": "kv/cards",
    }
    copy = tmp_path / "overlays/gpu-rdma"
    shutil.copytree(K8S, tmp_path, dirs_exist_ok=True)
    (copy / "settings.yaml").write_text(yaml.safe_dump(settings))
    objects = kustomize(copy)
    text = yaml.safe_dump_all(objects)
    assert "Qwen" not in text and "baton-keys" not in text and "rdma-net" not in text
    assert text.count("kv/cards") == len(ENGINES)
    for component, pod in pods(objects).items():
        if component != "router":
            assert pod["initContainers"][0]["args"][:3] == ["baton", "fetch", "some/model"]
            suffix = "" if component in ENGINES else ".tokenizer"
            assert environment(pod)["BATON_MODEL"] == f"/models/some--model{suffix}"


@pytest.fixture
def elsewhere() -> Iterator[Cluster]:
    """A namespace of another name than the overlays have."""
    found = Cluster(f"baton-kustomize-{secrets.token_hex(4)}")
    found.run("kubectl", "create", "namespace", found.namespace)
    yield found
    found.run("kubectl", "delete", "namespace", found.namespace, "--wait=false")


@every_overlay
def test_a_real_api_server_takes_it_in_any_namespace(
    overlay: str, elsewhere: Cluster, tmp_path: Path
) -> None:
    wrapper = {
        "namespace": elsewhere.namespace,
        "resources": [os.path.relpath(K8S / "overlays" / overlay, tmp_path.resolve())],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(wrapper))
    said = elsewhere.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-k", str(tmp_path)
    )
    for component in COMPONENTS:
        assert f"deployment.apps/baton-{component} serverside-applied" in said


@pytest.mark.parametrize("folder", ["cpu", "gpu-rdma"])
def test_a_real_api_server_takes_its_namespace(folder: str) -> None:
    found = kustomize(K8S / "prerequisites" / folder)
    (namespace,) = [each for each in found if each["kind"] == "Namespace"]
    assert namespace["metadata"]["name"] == "baton"
    Cluster("default").run(
        *("kubectl", "apply", "--server-side", "--dry-run=server", "-f", "-"),
        text=yaml.safe_dump(namespace),
    )
