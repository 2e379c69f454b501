"""The tools around the images' locks: what they take, what they refuse, what they write."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import audit
import lock_base
import lock_images
import sbom
import vendor

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
TAG = "docker.io/library/python:3.11-slim-bookworm"


def script(name: str) -> ModuleType:
    """One of deploy/image, which no package holds: they run in images that are being built."""
    spec = importlib.util.spec_from_file_location(name, IMAGE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


debian = script("debian")
inventory = script("inventory")


def manifest(*platforms: str) -> bytes:
    entries = [dict(zip(("os", "architecture"), one.split("/"), strict=True)) for one in platforms]
    return json.dumps({"manifests": [{"platform": one} for one in entries]}).encode()


def test_a_base_image_is_pinned_by_the_digest_of_its_manifest() -> None:
    raw = manifest("linux/amd64", "linux/arm64")
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    assert lock_base.digest_of(raw) == digest
    for before in (f"ARG PYTHON={TAG}\nFROM a\n", f"ARG PYTHON={TAG}@sha256:{'0' * 64}\nFROM a\n"):
        pinned = lock_base.pin_image(before, digest)
        assert pinned == f"ARG PYTHON={TAG}@{digest}\nFROM a\n"
        assert lock_base.base_of(pinned) == (TAG, digest)


def test_a_base_image_that_is_not_there_for_the_locks_platform_is_refused() -> None:
    with pytest.raises(ValueError, match="no image for linux/amd64"):
        lock_base.digest_of(manifest("linux/arm64"))


def test_a_manifest_is_read_by_the_first_tool_that_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = manifest("linux/amd64")
    (tmp_path / "raw").write_bytes(raw)
    works = f'#!/bin/sh\n[ "$*" = "inspect --raw docker://{TAG}" ] && cat {tmp_path}/raw\n'
    for name, text in (("docker", "#!/bin/sh\nexit 125\n"), ("skopeo", works)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert lock_base.manifest_of(TAG) == raw
    (tmp_path / "skopeo").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no docker, skopeo or crane"):
        lock_base.manifest_of(TAG)


def test_a_debian_package_comes_from_any_place_and_with_its_hash_only(tmp_path: Path) -> None:
    path = "pool/main/h/hello/hello_2.10%2b1_amd64.deb"
    places = []
    for place, content in (("empty", None), ("other", b"another file"), ("right", b"the file")):
        (tmp_path / place / "debian" / path).parent.mkdir(parents=True)
        if content is not None:
            (tmp_path / place / "debian" / path.replace("%2b", "+")).write_bytes(content)
        places.append(f"{(tmp_path / place).as_uri()}/{{archive}}/{{path}}")
    digest = hashlib.sha256(b"the file").hexdigest()
    text = f"from {places[1]}\nfrom {places[2]}\n{digest} debian {path}\n"
    read_places, (package,) = debian.read(text)
    assert debian.fetch(package, [places[0], *read_places]) == b"the file"
    with pytest.raises(ValueError, match="not the file that is locked"):
        debian.fetch(package, places[:2])


def test_the_compilers_lock_can_be_read_by_what_installs_it() -> None:
    places, packages = debian.read(lock_base.COMPILER.read_text())
    assert [place.split("/")[2] for place in places] == [
        "deb.debian.org",
        "snapshot.debian.org",
    ]
    for package in packages:
        assert all("{" not in place.format(**package._asdict()) for place in places)


@pytest.mark.skipif(not Path(lock_base.KEYRING).exists(), reason="needs Debian's apt")
def test_the_compilers_lock_takes_debians_archive_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine's own sources gets into it: an archive that is not there ends it."""
    monkeypatch.setattr(lock_base, "MIRROR", "file:///nonexistent")
    with pytest.raises(subprocess.CalledProcessError):
        lock_base.compiler_lock(datetime.now(UTC))


STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u14
Description: GNU C Library
 Version: not this one

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: gcc
Status: install ok installed
Architecture: amd64
Version: 4:12.2.0-3
"""


def test_an_inventory_has_what_dpkg_has_installed(tmp_path: Path) -> None:
    form = "https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
    (tmp_path / "libc6").write_text(f"Format: {form}\n\nLicense: LGPL-2.1+\n Text.\nLicense: MIT\n")
    (tmp_path / "gcc").write_text("This is free software.\nLicense: of no form\n")
    found = list(inventory.debian_packages(STATUS, str(tmp_path / "{}")))
    assert [(one["name"], one["version"]) for one in found] == [
        ("libc6", "2.36-9+deb12u14"),
        ("gcc", "4:12.2.0-3"),
    ]
    assert [one["licenses"] for one in found] == [["LGPL-2.1+", "MIT"], []]


def test_an_inventory_has_the_python_packages_of_where_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(IMAGE / "inventory.py"), TAG],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["base"] == TAG
    packages = {one["name"].lower(): one for one in found["python_packages"]}
    assert packages["cyclonedx-python-lib"]["version"] == version("cyclonedx-python-lib")
    assert packages["packageurl-python"]["license"] == "MIT"


def image_of(target: str) -> dict[str, Any]:
    """What `inventory.py` prints of an image that was built from its lock."""
    pinned = lock_images.pins((lock_images.LOCKS / f"{target}.txt").read_text())
    nothing: dict[str, Any] = {
        "expression": None,
        "license": None,
        "classifiers": [],
        "sha256": None,
    }
    packages = [{"name": p.name, "version": p.version, **nothing} for p in pinned.values()]
    packages[0]["expression"] = "Apache-2.0 OR MIT"
    packages[1]["license"] = "A licence's whole text\nin many lines"
    packages[1]["classifiers"] = ["License :: OSI Approved :: MIT License"]
    ours = {"name": "baton", "version": "0.1.0", **nothing, "sha256": "ab" * 32}
    return {
        "base": f"{TAG}@sha256:{'0' * 64}",
        "python": {"version": "3.11.16", "prefix": "/usr/local"},
        "os": {"ID": "debian", "VERSION_ID": "12"},
        "python_packages": [*packages, ours],
        "base_python_packages": [{"name": "pip", "version": "24.0", **nothing}],
        "debian_packages": list(inventory.debian_packages(STATUS)),
    }


@pytest.mark.parametrize("target", sbom.TARGETS)
def test_a_bill_of_materials_is_valid_and_complete(target: str, tmp_path: Path) -> None:
    """`text_of` checks it against CycloneDX' own schema."""
    (tmp_path / "inventory.json").write_text(json.dumps(image_of(target)))
    out = tmp_path / "sbom.json"
    command = [target, "--inventory", str(tmp_path / "inventory.json"), "--out", str(out)]
    assert sbom.main([*command, "--version", "1.2.3", "--revision", "abc"]) == 0
    document = json.loads(out.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    image = document["metadata"]["component"]
    assert (image["name"], image["version"], image["type"]) == (
        f"baton-{target}",
        "1.2.3",
        "container",
    )
    found = {one["purl"]: one for one in document["components"]}
    assert len(found) == len(document["components"])
    pinned = lock_images.pins((lock_images.LOCKS / f"{target}.txt").read_text())
    for name, pin in pinned.items():
        component = found[f"pkg:pypi/{name}@{pin.version.replace('+', '%2B')}"]
        assert {one["content"] for one in component["hashes"]} == set(pin.hashes)
    assert found["pkg:pypi/baton@0.1.0"]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert {"pkg:generic/cpython@3.11.16", "pkg:pypi/pip@24.0"} <= set(found)
    (script,) = found[f"pkg:npm/marked@{vendor.locked()['version']}"]["hashes"]
    served = (vendor.VENDOR / "marked.js").read_bytes()
    assert script == {"alg": "SHA-256", "content": hashlib.sha256(served).hexdigest()}
    gcc = found["pkg:deb/debian/gcc@4:12.2.0-3?arch=amd64&distro=debian-12"]
    assert gcc["hashes"][0]["content"] in lock_base.COMPILER.read_text()
    everything = {one["bom-ref"] for one in document["components"]}
    (depends,) = [one for one in document["dependencies"] if one["ref"] == image["bom-ref"]]
    assert set(depends["dependsOn"]) == everything


@pytest.mark.parametrize(
    ("package", "licenses"),
    [
        ({"expression": "Apache-2.0 OR MIT"}, [{"expression": "Apache-2.0 OR MIT"}]),
        ({"license": "MIT"}, [{"license": {"id": "MIT"}}]),
        ({"license": "UNKNOWN"}, None),
        (
            {"license": "Text\nof it", "classifiers": ["License :: OSI Approved :: ISC License"]},
            [{"license": {"name": "ISC License"}}],
        ),
    ],
)
def test_a_licence_is_what_the_package_says_best(
    package: dict[str, Any], licenses: list[Any] | None
) -> None:
    image = image_of("cpu")
    image["python_packages"][-1] |= package
    document = json.loads(sbom.text_of(sbom.bom_of("cpu", image, "1", "abc")))
    (ours,) = [one for one in document["components"] if one["name"] == "baton"]
    assert ours.get("licenses") == licenses


@pytest.mark.parametrize(
    "other", [{"name": "not-of-the-lock"}, {"version": "0.0.1"}], ids=["absent", "another version"]
)
def test_a_package_that_is_not_of_the_lock_is_an_error(
    other: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = image_of("cpu")
    image["python_packages"][0] |= other
    (tmp_path / "inventory.json").write_text(json.dumps(image))
    out = tmp_path / "sbom.json"
    assert (
        sbom.main(["cpu", "--inventory", str(tmp_path / "inventory.json"), "--out", str(out)]) == 1
    )
    assert "is in the image and not in its lock" in capsys.readouterr().err
    assert not out.exists()


def test_the_pages_library_is_the_locked_one() -> None:
    lock = vendor.locked()
    assert list(vendor.faults()) == []
    assert f"{lock['name']} v{lock['version']} " in (vendor.VENDOR / "marked.js").read_text()
    assert f"{lock['name']} {lock['version']}," in (ROOT / "NOTICE").read_text()


def test_another_library_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "marked.js").write_text("other")
    (tmp_path / "more.js").write_text("")
    assert sorted(vendor.faults(tmp_path)) == [
        "marked.LICENSE.txt is not there",
        "marked.js is not the file of page.json",
        "more.js is not in page.json",
    ]


def test_a_package_is_copied_if_it_is_the_locked_one(tmp_path: Path) -> None:
    package = tmp_path / "one-1.0.0.tgz"
    with tarfile.open(package, "w:gz") as archive:
        (tmp_path / "a.js").write_text("the library")
        archive.add(tmp_path / "a.js", "package/lib/a.js")
    lock = {
        "integrity": vendor.integrity_of(package),
        "files": {"b.js": {"source": "lib/a.js", "sha256": ""}},
    }
    vendor.copy(package, lock, tmp_path)
    assert (tmp_path / "b.js").read_text() == "the library"
    assert lock["files"] == {
        "b.js": {"source": "lib/a.js", "sha256": hashlib.sha256(b"the library").hexdigest()}
    }
    package.write_bytes(package.read_bytes() + b"x")
    with pytest.raises(ValueError, match="is locked"):
        vendor.copy(package, lock, tmp_path)


class Advisories(ThreadingHTTPServer):
    """Answers as osv.dev does. `vulnerable`: what has an advisory, as name==version."""

    vulnerable: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Query)


class _Query(BaseHTTPRequestHandler):
    server: Advisories

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        package = asked["package"]
        found = {"id": "PYSEC-0000-1", "summary": "s", "affected": [{"package": package}]}
        known = f"{package['name']}=={asked['version']}" in self.server.vulnerable
        answer = json.dumps({"vulns": [found]} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def advisories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Advisories]:
    with Advisories() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("PIP_AUDIT_OSV_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


CANARY = frozenset(f"{name}=={version}" for name, version in audit.CANARY.items())


@pytest.mark.deep
def test_an_audit_fails_for_what_it_finds(
    advisories: Advisories, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build of torch has the advisories of its version."""
    locked = audit.locked()["grpcio"]
    torch = lock_images.pins((lock_images.LOCKS / "engine-cpu.txt").read_text())["torch"]
    assert torch.version != torch.public_version
    known = {f"grpcio=={locked}", "uvloop==0.0.1", f"torch=={torch.public_version}"}
    advisories.vulnerable = CANARY | known
    assert audit.main([], ("osv",)) == audit.FOUND
    said = capsys.readouterr().out
    assert f"grpcio {locked}: PYSEC-0000-1" in said
    assert f"torch {torch.public_version}: PYSEC-0000-1" in said
    assert "checked by osv, 2 with vulnerabilities" in said


@pytest.mark.deep
def test_an_audit_that_finds_nothing_says_how_much_it_checked(
    advisories: Advisories, capsys: pytest.CaptureFixture[str]
) -> None:
    advisories.vulnerable = CANARY
    assert audit.main([], ("osv",)) == 0
    said = capsys.readouterr().out
    assert f"{len(audit.locked())} locked packages checked by osv, 0 with" in said


@pytest.mark.deep
@pytest.mark.parametrize(("argv", "status"), [([], 0), (["--required"], audit.UNCHECKED)])
def test_an_audit_without_a_source_says_that_nothing_was_checked(
    argv: list[str], status: int, advisories: Advisories, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers, as an index without advisories does: no vulnerability of any package."""
    advisories.vulnerable = frozenset()
    assert audit.main(argv, ("osv",)) == status
    assert "NOT CHECKED" in capsys.readouterr().out


def test_a_source_that_is_not_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_AUDIT_OSV_URL", "http://127.0.0.1:9")
    assert audit.source_of(("osv",)) is None


def test_what_a_source_does_not_know_is_not_called_sound() -> None:
    answer = {
        "dependencies": [
            {"name": "a", "skip_reason": "not found"},
            {"name": "b", "version": "1", "vulns": []},
            {"name": "c", "version": "1", "vulns": [{"id": "Z"}, {"id": "A"}]},
        ]
    }
    assert audit.read(answer) == audit.Report({"c": ["A", "Z"]}, ["a"])
