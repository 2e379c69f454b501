"""The Job of the load test names what there is: flags, scenarios, the Service of the router."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from baton_loadtest import scenario_file, scenarios
from baton_loadtest.load import command
from batonlm.rpc.address import split

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "loadtest"
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
POD: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    program, *words = CONTAINER["args"]
    assert program == "baton"
    return parser.parse_args(words)


def test_every_scenario_is_in_the_config_map() -> None:
    (files,) = (each["files"] for each in KUSTOMIZATION["configMapGenerator"])
    assert files == [str(scenario_file(name).relative_to(FOLDER)) for name in scenarios()]


def test_its_flags_are_flags_and_its_files_are_mounted() -> None:
    args = asked()
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert str(args.scenario.parent) == mounts["scenarios"]
    assert args.scenario.stem in scenarios()
    assert str(args.json.parent) == mounts["results"]
    assert args.html is None, "the image has nothing to draw plots with"
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert set(volumes) == set(mounts)
    (config_map,) = KUSTOMIZATION["configMapGenerator"]
    assert volumes["scenarios"]["configMap"]["name"] == config_map["name"]


def test_it_asks_the_routers_service() -> None:
    host, port = split(asked().http, "http")
    objects = yaml.safe_load_all((ROOT / "deploy/k8s/base/router.yaml").read_text())
    (service,) = (
        each for each in objects
        if each["kind"] == "Service" and each["metadata"]["name"] == host
    )  # fmt: skip
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert ports["http"] == port


def test_it_has_no_rights() -> None:
    assert POD["automountServiceAccountToken"] is False
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
