"""Resolves what each image installs into deploy/locks, or checks that against pyproject.toml.

    lock_images.py --torch 2.13.0            resolve; takes a package index, downloads CUDA's wheels
    lock_images.py --torch 2.13.0 --check    compare, without a network

Resolving is pip's own. Knows which of Baton's extras an image has; not how images are built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
ASKED = LOCKS / "asked.json"
"""What each lock was resolved from."""
PYTHON = "3.11"
"""Of the images."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
RESOLVE_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Image:
    """extras: Baton's own. torch: how its build is asked for, after the version.

    without: what a dependency asks for and an image does not need. NIXL comes once for each version
    of CUDA; without CUDA either does.
    """

    extras: tuple[str, ...]
    torch: str = ""
    without: frozenset[str] = frozenset()


IMAGES = {
    "cpu": Image(extras=("k8s", "otel", "vllm")),
    "engine-cpu": Image(("engine", "otel"), "=={}+cpu", frozenset({"nixl-cu13"})),
    # Exactly this version and no local one: torch's own wheel for CUDA 13.
    "engine-gpu": Image(("engine", "otel"), "==={}", frozenset({"nixl-cu12"})),
}
PROCESS_1 = "dumb-init>=1.2.5"


def asked_of(
    project: dict[str, object], build: dict[str, object], torch: str
) -> dict[str, list[str]]:
    """What every lock has to satisfy, as pyproject.toml says it now."""
    own = _strings(project["dependencies"])
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    asked = {}
    for name, image in IMAGES.items():
        lines = [*own, *(line for extra in image.extras for line in extras[extra]), PROCESS_1]
        asked[name] = sorted([*lines, f"torch=={torch}"] if image.torch else lines)
    asked["build"] = sorted(_strings(build["requires"]))
    return asked


def pins(text: str) -> dict[str, str]:
    """A lock's versions by normal name. Raises ValueError for a line that is no pin."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equal, version = line.partition("==")
        if not equal or not name or not version or version != version.strip("=* "):
            raise ValueError(f"not a pin: {line!r}")
        if canonicalize_name(name) in found:
            raise ValueError(f"twice: {name}")
        found[canonicalize_name(name)] = version
    return found


def faults(
    asked: dict[str, list[str]], was_asked: dict[str, list[str]], locks: dict[str, str]
) -> list[str]:
    """Why locks are not those of what is asked; empty: they are."""
    said = []
    seen: dict[str, tuple[str, str]] = {}
    environment = {str(k): str(v) for k, v in default_environment().items()}
    environment |= {"python_version": PYTHON, "sys_platform": "linux"}
    for name, lines in asked.items():
        if was_asked.get(name) != lines:
            said.append(f"{name}: pyproject.toml asks for something else than it was resolved from")
        pinned = pins(locks[name])
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate(environment):
                continue
            version = pinned.get(canonicalize_name(requirement.name))
            if version is None:
                said.append(f"{name}: {requirement.name} is not pinned")
            elif not requirement.specifier.contains(version, prereleases=True):
                said.append(f"{name}: {requirement.name} {version} is not what {line} asks for")
        for package, version in pinned.items():
            where, other = seen.setdefault(package, (name, version))
            if other != version:
                said.append(f"{package} is {other} in {where} and {version} in {name}")
    return said


def resolve(lines: Sequence[str], options: Sequence[str] = ()) -> dict[str, str]:
    """Names and versions of all that pip would install. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed",
             "--only-binary=:all:", "--python-version", PYTHON, "--target", folder,
             "--report", str(report), *options, *lines],
            check=True, timeout=RESOLVE_TIMEOUT_S,
        )  # fmt: skip
        installed = json.loads(report.read_text())["install"]
    return {
        one["metadata"]["name"]: one["metadata"]["version"].partition("+")[0] for one in installed
    }


def lock(name: str, lines: list[str], torch: str) -> str:
    image = IMAGES.get(name, Image(()))
    if image.torch:
        lines = [line for line in lines if not line.startswith("torch")]
        lines.append("torch" + image.torch.format(torch))
    try:
        found = resolve(lines)
    except subprocess.CalledProcessError:
        if "+cpu" not in image.torch:
            raise
        found = resolve(lines, ["--extra-index-url", TORCH_INDEX])
    wanted = [p for p in found if canonicalize_name(p) not in image.without]
    return "".join(f"{p}=={found[p]}\n" for p in sorted(wanted, key=str.lower))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Resolve or check what the images install.")
    parser.add_argument("--torch", required=True, help="the version of torch")
    parser.add_argument("--check", action="store_true", help="compare only; no network")
    parser.add_argument("images", nargs="*", help="of which images (default: all)")
    args = parser.parse_args(argv)
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = asked_of(document["project"], document["build-system"], args.torch)
    if args.check:
        locks = {name: (LOCKS / f"{name}.txt").read_text() for name in asked}
        said = faults(asked, json.loads(ASKED.read_text()), locks)
        for line in said:
            print(f"deploy/locks: {line}; run `make image-locks`", file=sys.stderr)
        return 1 if said else 0
    was_asked = json.loads(ASKED.read_text()) if ASKED.exists() else {}
    for name in args.images or asked:
        (LOCKS / f"{name}.txt").write_text(lock(name, asked[name], args.torch))
        was_asked[name] = asked[name]
        print(f"deploy/locks/{name}.txt")
    ASKED.write_text(json.dumps(was_asked, indent=2, sort_keys=True) + "\n")
    return 0


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(one) for one in value]


if __name__ == "__main__":
    sys.exit(main())
