"""Packages the chart: as Helm's archive, and as an OCI archive that any registry takes.

    package_chart.py [--home URL] [--key NAME --keyring FILE] [--out build/chart]

Writes baton-VERSION.tgz, with a key its provenance (.prov), and baton-VERSION.oci.tar, an OCI
layout with the chart and its provenance as Helm's own media types:

    helm push build/chart/baton-0.1.0.tgz oci://registry.example.com/charts
    skopeo copy oci-archive:build/chart/baton-0.1.0.oci.tar docker://registry.example.com/charts/baton:0.1.0

--home: the repository that links, the icon and runbooks of alerts lead to. Needs helm on PATH. A
passphrase of the key comes from $HELM_KEY_PASSPHRASE, without which the key must have none.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/baton"
ICON = "docs/images/icon.svg"
HELM_S = 120.0

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.cncf.helm.config.v1+json"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
PROVENANCE = "application/vnd.cncf.helm.chart.provenance.v1.prov"

Json = dict[str, Any]


def about(text: str, home: str) -> Json:
    """Chart.yaml with addresses in a repository. text: Chart.yaml. home: empty for no address."""
    chart: Json = yaml.safe_load(text)
    if home:
        home = home.rstrip("/")
        at = f"v{chart['appVersion']}"
        links = [{"name": "documentation", "url": f"{home}/blob/{at}/docs/kubernetes.md"}]
        chart |= {"home": home, "sources": [home], "icon": f"{home}/raw/{at}/{ICON}"}
        chart["annotations"] |= {"artifacthub.io/links": yaml.safe_dump(links)}
    return chart


def package(out: Path, home: str, key: str, keyring: str) -> Path:
    """Returns Helm's archive; its provenance lies beside it where there is a key. Raises
    RuntimeError with what helm said."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / CHART.name
        shutil.copytree(CHART, copy)
        chart = about((copy / "Chart.yaml").read_text(), home)
        (copy / "Chart.yaml").write_text(yaml.safe_dump(chart, sort_keys=False))
        command = ["helm", "package", str(copy), "--destination", str(out)]
        if key:
            command += ["--sign", "--key", key, "--keyring", keyring, "--passphrase-file", "-"]
        done = subprocess.run(
            command,
            input=os.environ.get("HELM_KEY_PASSPHRASE", "") + "\n",
            capture_output=True,
            text=True,
            timeout=HELM_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return out / f"{chart['name']}-{chart['version']}.tgz"


def oci_archive(archive: Path) -> Path:
    """An OCI layout, in a tar file, of Helm's archive and the provenance beside it."""
    with tarfile.open(archive) as chart:
        member = chart.extractfile(f"{CHART.name}/Chart.yaml")
        assert member is not None
        stated: Json = yaml.safe_load(member.read())
    layers = [(CONTENT, archive.read_bytes())]
    provenance = archive.with_name(f"{archive.name}.prov")
    if provenance.exists():
        layers.append((PROVENANCE, provenance.read_bytes()))
    blobs: dict[str, bytes] = {}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(blobs, CONFIG, json.dumps(stated).encode()),
        "layers": [_blob(blobs, kind, content) for kind, content in layers],
        "annotations": {
            "org.opencontainers.image.title": stated["name"],
            "org.opencontainers.image.version": stated["version"],
            "org.opencontainers.image.description": stated["description"],
        },
    }
    listed = _blob(blobs, MANIFEST, json.dumps(manifest).encode())
    listed["annotations"] = {"org.opencontainers.image.ref.name": stated["version"]}
    index = {"schemaVersion": 2, "manifests": [listed]}
    made = archive.with_suffix(".oci.tar")
    with tarfile.open(made, "w") as layout:
        _add(layout, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(layout, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(layout, f"blobs/sha256/{digest}", content)
    return made


def _blob(blobs: dict[str, bytes], kind: str, content: bytes) -> Json:
    """Keeps a blob. Returns its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}


def _add(layout: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    layout.addfile(entry, io.BytesIO(content))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--home", default="", help="URL of the repository")
    parser.add_argument("--key", default="", help="name of the key that signs")
    parser.add_argument("--keyring", default="", help="file with the secret key")
    parser.add_argument("--out", type=Path, default=ROOT / "build/chart")
    args = parser.parse_args(argv)
    if bool(args.key) != bool(args.keyring):
        parser.error("--key and --keyring belong together")
    try:
        archive = package(args.out, args.home, args.key, args.keyring)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    made = [archive, archive.with_name(f"{archive.name}.prov"), oci_archive(archive)]
    print("\n".join(str(path) for path in made if path.exists()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
