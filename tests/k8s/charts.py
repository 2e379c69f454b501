"""Renders the chart with helm and reads what came out.

Helm must be on PATH: it comes with whatever KUBECONFIG comes from.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/baton"
COMPONENTS = ("router", "tokenizer", "prefill", "decode", "detokenizer")
ENGINES = ("prefill", "decode")
VALUES_FILES = sorted(CHART.glob("ci/*-values.yaml"))
PRESETS = sorted(CHART.glob("values-*.yaml"))
TWO_NODES = CHART / "values-gpu-two-nodes.yaml"
SIZES = sorted([*CHART.glob("values-gpu-*b.yaml"), TWO_NODES])
CPU = CHART / "values-cpu.yaml"
RELEASE = "try"
TIMEOUT_S = 120.0

GPU_SETS = ("model.hub.id=some/model", "auth.keysSecret=baton-keys")
"""What the GPU presets leave to the user."""

Json = dict[str, Any]


class Refused(Exception):
    """Helm would not; text is all that it said."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def helm(*arguments: str) -> str:
    """Standard output. Raises Refused."""
    done = subprocess.run(
        ["helm", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def render(
    *files: Path, sets: Iterable[str] = (), namespace: str = "chart", release: str = RELEASE
) -> list[Json]:
    """All objects of the chart with these values. Raises Refused."""
    arguments = [part for file in files for part in ("-f", str(file))]
    arguments += [part for each in sets for part in ("--set", each)]
    text = helm("template", release, str(CHART), "-n", namespace, *arguments)
    return [each for each in yaml.safe_load_all(text) if each]


def stack(file: Path) -> list[Path]:
    """The values files to give: a preset of a size comes after one of a network."""
    return [CHART / "values-gpu-rdma.yaml", file] if file in SIZES else [file]


@functools.cache
def rendered(file: Path) -> Sequence[Json]:
    """The objects of one values file, rendered once. Not to be changed."""
    sets = GPU_SETS if file.name.startswith("values-gpu") else ()
    return render(*stack(file), sets=sets)


def of_kind(objects: Iterable[Json], kind: str) -> dict[str, Json]:
    """Objects of a kind by component, or by name where they have none."""
    return {_key(each): each for each in objects if each["kind"] == kind}


def pods(objects: Iterable[Json]) -> dict[str, Json]:
    """Pod specs by component; that of `helm test` is "test"."""
    objects = list(objects)
    found = {k: template["spec"] for k, template in templates(objects).items()}
    return found | {k: pod["spec"] for k, pod in of_kind(objects, "Pod").items()}


def templates(objects: Iterable[Json]) -> dict[str, Json]:
    """Of the pods that serve, by component: of a group, its leader."""
    objects = list(objects)
    found = {k: d["spec"]["template"] for k, d in of_kind(objects, "Deployment").items()}
    groups = of_kind(objects, "LeaderWorkerSet")
    return found | {
        k: g["spec"]["leaderWorkerTemplate"]["leaderTemplate"] for k, g in groups.items()
    }


def environment(pod: Json, pod_ip: str = "198.18.1.9") -> dict[str, str]:
    """What the process of a pod finds, with the pod's address and some secrets filled in."""
    entries = pod["containers"][0]["env"]
    secrets = {e["name"] for e in entries if "secretKeyRef" in e.get("valueFrom", {})}
    values = {e["name"]: e.get("value", pod_ip) for e in entries}
    values |= dict.fromkeys(secrets, "of a Secret, and long enough")
    return {name: value.replace("$(POD_IP)", pod_ip) for name, value in values.items()}


def _key(each: Json) -> str:
    labels = each["metadata"].get("labels", {})
    return str(labels.get("app.kubernetes.io/component") or each["metadata"]["name"])
