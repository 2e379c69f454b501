"""Objects of other people's operators fit those operators' own definitions, field by field.

The types of npm's @kubernetes-models are generated from their CustomResourceDefinitions; TypeScript
takes a literal of such a type only where each field is one of it, at every depth, with a value that
it may have. Needs helm. LeaderWorkerSet and InferencePool are in no package that there is: their
schemas are `tests/k8s/lws.json` and `tests/k8s/inferencepool.json`.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.clients.conftest import RUN_S, install
from tests.k8s.charts import COMPONENTS, GPU_SETS, PRESETS, VALUES_FILES, Json, render, stack

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
]

PACKAGES = {
    "keda": "2.0.0",
    "prometheus-operator": "6.0.0",
    "cert-manager": "6.0.0",
    "gateway-api": "2.0.0",
}
KINDS = {
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
    "Certificate": "cert-manager/cert-manager.io/v1",
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "GRPCRoute": "gateway-api/gateway.networking.k8s.io/v1",
}


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TypeScript and the operators' types."""
    folder = tmp_path_factory.mktemp("operators")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    wanted = [f"@kubernetes-models/{name}@{version}" for name, version in PACKAGES.items()]
    npm = ("npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--loglevel=error")
    install(*npm, "typescript@5.9.3", *wanted)
    return folder


def faults(types: Path, objects: Iterable[Json]) -> str:
    """What TypeScript says of objects as literals of their kinds' types; empty: they fit."""
    lines = []
    for number, each in enumerate(objects):
        kind = each["kind"]
        module = f"@kubernetes-models/{KINDS[kind]}/{kind}"
        lines.append(f'import type {{ I{kind} as T{number} }} from "{module}";')
        lines.append(f"export const o{number}: T{number} = {json.dumps(each)};")
    (types / "objects.ts").write_text("\n".join(lines))
    done = subprocess.run(
        [
            *("node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck"),
            *("--module", "esnext", "--moduleResolution", "bundler", "objects.ts"),
        ],
        cwd=types, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def of_others() -> list[Json]:
    """Of every values file and preset, and of every pool scaled by KEDA."""
    found = []
    for path in (*VALUES_FILES, *PRESETS):
        sets = GPU_SETS if path.name.startswith("values-gpu") else ()
        found += render(*stack(path), sets=sets)
    keda = [f"{component}.keda.enabled=true" for component in COMPONENTS]
    cpu = [f"{component}.autoscaling.enabled=false" for component in COMPONENTS]
    everything = next(path for path in VALUES_FILES if path.stem == "everything-values")
    found += render(everything, sets=(*keda, *cpu))
    return [each for each in found if each["kind"] in KINDS]


def test_every_object_fits_its_operators_definition(types: Path) -> None:
    objects = of_others()
    assert {each["kind"] for each in objects} == set(KINDS)
    assert not faults(types, objects)


def test_a_field_that_an_operator_does_not_know_is_refused(types: Path) -> None:
    """Or the test above would show nothing. One beside the others, one in the first list."""
    objects = of_others()
    wrong = [copy.deepcopy(next(one for one in objects if one["kind"] == kind)) for kind in KINDS]
    for each in wrong:
        each["spec"]["noSuchField"] = 1
    said = faults(types, wrong)
    assert said.count("noSuchField") == len(KINDS), said
    deep = copy.deepcopy(next(one for one in objects if one["kind"] == "ServiceMonitor"))
    deep["spec"]["endpoints"][0]["relabelings"][0]["target"] = "x"
    assert "target" in faults(types, [deep])
