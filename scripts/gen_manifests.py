"""Makes deploy/k8s/base of what helm renders of the chart.

What is Helm's own is left out: labels that say so, and the pod of `helm test`. So is the namespace,
which an overlay says: workers are looked for in the router's own. `--check` writes nothing and
fails when a file differs. Needs helm on PATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/helm/baton"
BASE = ROOT / "deploy/k8s/base"
RELEASE = "baton"
NAMESPACE = "any"
HELM_S = 120.0

COMPONENT = "app.kubernetes.io/component"
HELMS_LABELS = ("app.kubernetes.io/managed-by", "helm.sh/chart")
HOOK = "helm.sh/hook"
HEAD = (
    "# Made of deploy/helm/baton by scripts/gen_manifests.py: change that, then `make manifests`.\n"
)

_POOL = re.compile(r"k8s:///([\w-]+)\.[\w-]+:grpc")

Json = dict[str, Any]


def make(rendered: str) -> dict[str, str]:
    """Text of each file by its name: one per component, and one that lists them."""
    files: dict[str, list[Json]] = {}
    for each in plain(yaml.safe_load_all(rendered)):
        component = each["metadata"]["labels"].get(COMPONENT, "release")
        files.setdefault(f"{component}.yaml", []).append(each)
    listing: Json = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(files),
    }
    texts = {name: _text(objects) for name, objects in sorted(files.items())}
    return {**texts, "kustomization.yaml": _text([listing])}


def plain(objects: Iterable[Json | None]) -> list[Json]:
    """Helm's objects without what is Helm's, and without a namespace; by kind and name."""
    there = [each for each in objects if each]
    kept = [each for each in there if HOOK not in each["metadata"].get("annotations", {})]
    for each in kept:
        each["metadata"].pop("namespace", None)
        for label in HELMS_LABELS:
            each["metadata"]["labels"].pop(label, None)
        for subject in each.get("subjects", ()):
            subject.pop("namespace", None)
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                for entry in container["env"]:
                    if "value" in entry:
                        entry["value"] = _POOL.sub(r"k8s:///\1:grpc", entry["value"])
                    if entry["name"] == "BATON_ALLOWED_HOSTS":
                        entry["value"] = _anywhere(entry["value"])
    return sorted(kept, key=lambda each: (each["kind"], each["metadata"]["name"]))


def _anywhere(hosts: str) -> str:
    """The names of a Service without its namespace: what is below `svc` is the cluster's own."""
    names = hosts.split(",")
    bare = [name for name in names if "." not in name]
    below = [f"*.svc{name.partition('.svc')[2]}" for name in names if ".svc" in name]
    return ",".join([*bare, *below])


def differing(files: Mapping[str, str], folder: Path) -> list[str]:
    """Names of files that are missing, other than they should be, or nobody's."""
    there = {path.name for path in folder.glob("*.yaml")} - {"values.yaml"}
    stale = [n for n, text in files.items() if n not in there or (folder / n).read_text() != text]
    return sorted([*stale, *(there - set(files))])


def render() -> str:
    done = subprocess.run(
        ["helm", "template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(BASE / "values.yaml")],
        capture_output=True, text=True, timeout=HELM_S, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def _text(objects: Iterable[Json]) -> str:
    return HEAD + "---\n".join(yaml.safe_dump(each, sort_keys=False) for each in objects)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when they differ")
    args = parser.parse_args(argv)
    files = make(render())
    stale = differing(files, BASE)
    if args.check:
        if stale:
            print(f"deploy/k8s/base: {', '.join(stale)} differ: make manifests", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        if name in files:
            (BASE / name).write_text(files[name])
        else:
            (BASE / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
