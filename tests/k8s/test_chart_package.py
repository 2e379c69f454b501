"""`make package`: what comes out is the chart, as Helm and as a registry takes it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

import package_chart
from tests.k8s.charts import CPU, helm, render

pytestmark = pytest.mark.k8s

HOME = "https://git.example/team/baton"


def test_the_archive_renders_what_the_folder_does(tmp_path: Path) -> None:
    archive = package_chart.package(tmp_path, "", "", "")
    text = helm("template", "try", str(archive), "-n", "chart", "-f", str(CPU))
    assert [each for each in yaml.safe_load_all(text) if each] == render(CPU)
    with tarfile.open(archive) as chart:
        names = {Path(name).relative_to("baton").parts[0] for name in chart.getnames()}
    assert {"README.md", "values.schema.json", "values-gpu-rdma.yaml", "dashboards"} <= names
    assert "ci" not in names


def test_a_packaged_chart_leads_to_its_repository(tmp_path: Path) -> None:
    archive = package_chart.package(tmp_path, HOME, "", "")
    stated = yaml.safe_load(helm("show", "chart", str(archive)))
    assert stated["home"] == HOME and stated["sources"] == [HOME]
    for address in (stated["icon"], *(link["url"] for link in _links(stated))):
        path = address.removeprefix(f"{HOME}/").split(f"/v{stated['appVersion']}/")[1]
        assert (package_chart.ROOT / path).exists()
    sets = ("serviceMonitor.enabled=true", "alerts.enabled=true", "networkPolicy.monitoring[0].a=b")
    flags = [part for each in sets for part in ("--set", each)]
    text = helm("template", "try", str(archive), "-f", str(CPU), *flags)
    (rule,) = [
        each for each in yaml.safe_load_all(text) if each and each["kind"] == "PrometheusRule"
    ]
    for group in rule["spec"]["groups"]:
        for one in group["rules"]:
            page = f"{HOME}/blob/v{stated['appVersion']}/docs/runbooks/{one['alert']}.md"
            assert one["annotations"]["runbook_url"] == page


def _links(stated: dict[str, object]) -> list[dict[str, str]]:
    annotations = stated["annotations"]
    assert isinstance(annotations, dict)
    links: list[dict[str, str]] = yaml.safe_load(annotations["artifacthub.io/links"])
    return links


def test_an_oci_archive_holds_the_chart_by_its_digests(tmp_path: Path) -> None:
    archive = package_chart.package(tmp_path, "", "", "")
    with tarfile.open(package_chart.oci_archive(archive)) as layout:
        content = {
            name: file.read()
            for name in layout.getnames()
            if (file := layout.extractfile(name)) is not None
        }
    blobs = {name.rpartition("/")[2]: each for name, each in content.items() if "blobs" in name}
    assert all(hashlib.sha256(each).hexdigest() == digest for digest, each in blobs.items())
    (listed,) = json.loads(content["index.json"])["manifests"]
    manifest = json.loads(blobs[listed["digest"].removeprefix("sha256:")])
    (chart,) = manifest["layers"]
    assert chart["mediaType"] == package_chart.CONTENT
    assert blobs[chart["digest"].removeprefix("sha256:")] == archive.read_bytes()
    config = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert (config["name"], config["version"]) == (
        "baton",
        listed["annotations"]["org.opencontainers.image.ref.name"],
    )


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_a_signed_chart_is_verified(tmp_path: Path) -> None:
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ("gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "")
    made = ("--quick-generate-key", "Chart <chart@example.com>", "rsa3072", "sign", "never")
    subprocess.run([*gpg, *made], check=True, timeout=120)
    rings = {}
    for kind in ("--export-secret-keys", "--export"):
        rings[kind] = tmp_path / f"{kind.strip('-')}.gpg"
        done = subprocess.run([*gpg, kind], check=True, capture_output=True, timeout=120)
        rings[kind].write_bytes(done.stdout)
    secret = str(rings["--export-secret-keys"])
    archive = package_chart.package(tmp_path / "out", "", "Chart", secret)
    helm("verify", "--keyring", str(rings["--export"]), str(archive))
    with tarfile.open(package_chart.oci_archive(archive)) as layout:
        (index,) = [layout.extractfile(n) for n in layout.getnames() if n == "index.json"]
        assert index is not None
        digest = json.loads(index.read())["manifests"][0]["digest"].removeprefix("sha256:")
        file = layout.extractfile(f"blobs/sha256/{digest}")
        assert file is not None
        kinds = [layer["mediaType"] for layer in json.loads(file.read())["layers"]]
    assert kinds == [package_chart.CONTENT, package_chart.PROVENANCE]


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.gpg")
    with pytest.raises(RuntimeError):
        package_chart.package(tmp_path, "", "nobody", missing)
    assert not list(tmp_path.glob("*.prov"))
