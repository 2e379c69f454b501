"""Resolves what each image installs into deploy/locks, or checks that against pyproject.toml.

    lock_images.py --torch 2.13.0            resolve what changed; takes a package index
    lock_images.py --torch 2.13.0 --upgrade  resolve everything anew
    lock_images.py --torch 2.13.0 --check    compare, without a network
    lock_images.py --torch 2.13.0 engine-gpu-cu12
                                             one that is kept only where somebody wants it

A lock has one line for each package: name, version, and the SHA-256 of the one wheel that pip takes
for the images' Python on linux/amd64. Resolving is pip's own; the present locks constrain it, so a
new dependency leaves the versions of the others as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
ASKED = LOCKS / "asked.json"
"""What each lock was resolved from."""
PYTHON = "3.11"
"""Of the images."""
TORCH_INDEX = "https://download.pytorch.org/whl/{}"
"""Of PyTorch's own builds, by what is behind the + of their versions."""
RESOLVE_TIMEOUT_S = 1800
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s=*]+)((?: --hash=sha256:[0-9a-f]{64})+)")


@dataclass(frozen=True)
class Image:
    """What one image installs, apart from Baton's own dependencies."""

    extras: tuple[str, ...]
    """Baton's own."""
    torch: str = ""
    """How its build of torch is asked for, after the name; empty: it has none."""
    without: frozenset[str] = frozenset()
    """What a dependency asks for and the image does not need. NIXL comes once for each version of
    CUDA; without CUDA either does."""


@dataclass(frozen=True)
class Pin:
    """One line of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 in hexadecimal digits. One of them is what the file has."""

    @property
    def public_version(self) -> str:
        """Without what says how it was built: 2.13.0 of 2.13.0+cpu."""
        return self.version.partition("+")[0]

    def __str__(self) -> str:
        return " ".join(
            [f"{self.name}=={self.version}", *(f"--hash=sha256:{h}" for h in self.hashes)]
        )


IMAGES = {
    "cpu": Image(extras=("otel", "s3", "vllm")),
    "engine-cpu": Image(("engine", "otel", "s3"), "=={}+cpu", frozenset({"nixl-cu13"})),
    # Exactly this version and no local one: torch's own wheel for CUDA 13.
    "engine-gpu": Image(("engine", "otel", "s3"), "==={}", frozenset({"nixl-cu12"})),
}
BY_REQUEST = {
    # For drivers older than CUDA 13's. torch has no such build on PyPI.
    "engine-gpu-cu12": Image(("engine", "otel", "s3"), "=={}+cu126", frozenset({"nixl-cu13"})),
}
"""Images that are built by a lock that is not kept here (docs/gpu.md). Each is asked for the same
as the one whose name its own begins with."""
LOCKED = (*IMAGES, "build")
"""What there is a lock of: the images, and what builds and compiles Baton's own wheel."""
PROCESS_1 = "dumb-init>=1.2.5"


def asked_of(document: dict[str, Any], torch: str) -> dict[str, list[str]]:
    """What every lock has to satisfy. document: pyproject.toml as it is now."""
    project, wheel = document["project"], document["tool"]["hatch"]["build"]["targets"]["wheel"]
    own = _strings(project["dependencies"])
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    asked = {}
    for name, image in IMAGES.items():
        lines = [*own, *(line for extra in image.extras for line in extras[extra]), PROCESS_1]
        asked[name] = sorted([*lines, f"torch=={torch}"] if image.torch else lines)
    build = document["build-system"]["requires"], wheel["hooks"]["custom"]["dependencies"]
    asked["build"] = sorted(line for lines in build for line in _strings(lines))
    return asked


def pins(text: str) -> dict[str, Pin]:
    """A lock's lines by normal name. Raises ValueError for a line that is no pin with its hash."""
    found: dict[str, Pin] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"not a pin with its hash: {line!r}")
        name, version, hashes = match.groups()
        if canonicalize_name(name) in found:
            raise ValueError(f"twice: {name}")
        digests = tuple(one.removeprefix("--hash=sha256:") for one in hashes.split())
        found[canonicalize_name(name)] = Pin(name, version, digests)
    return found


def faults(
    asked: dict[str, list[str]], was_asked: dict[str, list[str]], locks: dict[str, str]
) -> list[str]:
    """Why locks are not those of what is asked; empty: they are."""
    said = []
    seen: dict[str, tuple[str, Pin]] = {}
    for name, lines in asked.items():
        if was_asked.get(name) != lines:
            said.append(f"{name}: pyproject.toml asks for something else than it was resolved from")
        pinned = pins(locks[name])
        for requirement in _that_hold(lines):
            pin = pinned.get(canonicalize_name(requirement.name))
            if pin is None:
                said.append(f"{name}: {requirement.name} is not pinned")
            elif not requirement.specifier.contains(pin.version, prereleases=True):
                said.append(
                    f"{name}: {requirement.name} {pin.version} is not what {requirement} asks for"
                )
        for package, pin in pinned.items():
            where, other = seen.setdefault(package, (name, pin))
            if other.public_version != pin.public_version:
                said.append(f"{package} is {other.version} in {where} and {pin.version} in {name}")
            elif other.version == pin.version and other.hashes != pin.hashes:
                said.append(f"{package} {pin.version} is another file in {where} than in {name}")
    return said


def resolve(
    lines: Sequence[str], constraints: Sequence[str] = (), options: Sequence[str] = ()
) -> list[Pin]:
    """All that pip would install. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        report, constrained = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constrained.write_text("".join(f"{line}\n" for line in constraints))
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed",
             "--only-binary=:all:", "--python-version", PYTHON, "--target", folder,
             "--constraint", str(constrained), "--report", str(report), *options, *lines],
            check=True, timeout=RESOLVE_TIMEOUT_S,
        )  # fmt: skip
        installed = json.loads(report.read_text())["install"]
    return [
        Pin(
            one["metadata"]["name"],
            one["metadata"]["version"],
            (one["download_info"]["archive_info"]["hashes"]["sha256"],),
        )
        for one in installed
    ]


def lock(
    name: str,
    lines: list[str],
    torch: str,
    present: dict[str, Pin],
    resolve: Callable[[Sequence[str], Sequence[str], Sequence[str]], list[Pin]] = resolve,
) -> str:
    """The text of one lock. present: pins to keep where what is asked allows it."""
    image = (IMAGES | BY_REQUEST).get(name, Image(()))
    if image.torch:
        lines = [line for line in lines if not line.startswith("torch")]
        lines.append("torch" + image.torch.format(torch))
    attempts: list[tuple[list[str], list[str]]] = [(_kept(lines, present), []), ([], [])]
    if build := image.torch.partition("+")[2]:
        index = ["--extra-index-url", TORCH_INDEX.format(build)]
        attempts += [(kept, index) for kept, _ in attempts]
    for number, (kept, options) in enumerate(attempts, 1):
        try:
            found = resolve(lines, kept, options)
            break
        except subprocess.CalledProcessError:
            if number == len(attempts):
                raise
            print(f"{name}: not to be had like this; trying another way", file=sys.stderr)
    wanted = [pin for pin in found if canonicalize_name(pin.name) not in image.without]
    return "".join(f"{pin}\n" for pin in sorted(wanted, key=lambda pin: pin.name.lower()))


def _present(name: str, among: Iterable[str]) -> dict[str, Pin]:
    """The pins of several locks, so that images agree; a lock's own come before the others'."""
    found: dict[str, Pin] = {}
    for one in sorted(among, key=lambda other: other == name):
        file = LOCKS / f"{one}.txt"
        found |= pins(file.read_text()) if file.exists() else {}
    return found


def _kept(lines: Sequence[str], present: dict[str, Pin]) -> list[str]:
    """The present pins as constraints, without those that the lines no longer allow."""
    kept = dict(present)
    for requirement in _that_hold(lines):
        pin = present.get(canonicalize_name(requirement.name))
        if pin and not requirement.specifier.contains(pin.version, prereleases=True):
            kept.pop(canonicalize_name(requirement.name), None)
    return [f"{pin.name}=={pin.version}" for pin in kept.values()]


def _that_hold(lines: Iterable[str]) -> list[Requirement]:
    """Requirements whose marker is true in an image."""
    environment = {str(k): str(v) for k, v in default_environment().items()}
    environment |= {"python_version": PYTHON, "sys_platform": "linux", "platform_machine": "x86_64"}
    found = [Requirement(line) for line in lines]
    return [one for one in found if not one.marker or one.marker.evaluate(environment)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Resolve or check what the images install.")
    parser.add_argument("--torch", required=True, help="the version of torch")
    parser.add_argument("--check", action="store_true", help="compare only; no network")
    parser.add_argument("--upgrade", action="store_true", help="keep no present version")
    parser.add_argument("images", nargs="*", help="of which images (default: all)")
    args = parser.parse_args(argv)
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = asked_of(document, args.torch)
    if args.check:
        locks = {name: (LOCKS / f"{name}.txt").read_text() for name in asked}
        said = faults(asked, json.loads(ASKED.read_text()), locks)
        for line in said:
            print(f"deploy/locks: {line}; run `make image-locks`", file=sys.stderr)
        return 1 if said else 0
    was_asked = json.loads(ASKED.read_text()) if ASKED.exists() else {}
    changed = [name for name in asked if args.upgrade or was_asked.get(name) != asked[name]]
    resolved: list[str] = []
    for name in args.images or changed:
        present = _present(name, resolved if args.upgrade else asked)
        of = name.rpartition("-")[0] if name in BY_REQUEST else name
        (LOCKS / f"{name}.txt").write_text(lock(name, asked[of], args.torch, present))
        resolved.append(name)
        if name in asked:
            was_asked[name] = asked[name]
        print(f"deploy/locks/{name}.txt")
    if not resolved:
        print("deploy/locks is in step with pyproject.toml; UPGRADE=yes resolves it anew")
    ASKED.write_text(json.dumps(was_asked, indent=2, sort_keys=True) + "\n")
    return 0


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(one) for one in value]


if __name__ == "__main__":
    sys.exit(main())
