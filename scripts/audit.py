"""Looks for published vulnerabilities in what the images install, by pip-audit.

Exit status: 0 nothing found, 1 something found. Where no source of advisories answers, nothing
was checked: that is printed, and the status is 0, or 3 with --required. A source counts only if it
knows the vulnerabilities of a release that is known to have some: an index without advisories
answers too, and what it knows nothing of looks the same as what is sound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lock_images

SOURCES = ("osv", "pypi")
"""As pip-audit calls them."""
CANARY = {"jinja2": "2.4.1"}
"""A release with published vulnerabilities, such as PYSEC-2019-217."""
FOUND, UNCHECKED = 1, 3
TIMEOUT_S = 600


@dataclass(frozen=True)
class Report:
    """What one source says of some packages."""

    vulnerable: dict[str, list[str]]
    """Advisories by name."""
    unknown: list[str]
    """Names of packages of which the source knows nothing, good or bad."""


def ask(source: str, packages: dict[str, str]) -> Report | None:
    """None: the source does not answer."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked.txt"), Path(folder, "answer.json")
        asked.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        try:
            subprocess.run(
                [sys.executable, "-m", "pip_audit", "--requirement", str(asked), "--no-deps",
                 "--disable-pip", "--vulnerability-service", source, "--format", "json",
                 "--output", str(answer), "--progress-spinner", "off", "--desc", "off"],
                capture_output=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        if not answer.exists():
            return None
        return read(json.loads(answer.read_text()))


def read(answer: dict[str, Any]) -> Report:
    """pip-audit's JSON."""
    vulnerable, unknown = {}, []
    for one in answer["dependencies"]:
        if "skip_reason" in one:
            unknown.append(one["name"])
        elif one["vulns"]:
            vulnerable[one["name"]] = sorted(found["id"] for found in one["vulns"])
    return Report(vulnerable, unknown)


def source_of(sources: Iterable[str]) -> str | None:
    """The first that knows the canary's vulnerabilities."""
    for source in sources:
        report = ask(source, CANARY)
        if report is not None and report.vulnerable:
            return source
    return None


def locked() -> dict[str, str]:
    """Versions by name, of all locks. A build of torch has the advisories of its version."""
    found: dict[str, str] = {}
    for name in lock_images.LOCKED:
        pinned = lock_images.pins((lock_images.LOCKS / f"{name}.txt").read_text())
        found |= {package: pin.public_version for package, pin in pinned.items()}
    return found


def main(argv: Sequence[str] | None = None, sources: Sequence[str] = SOURCES) -> int:
    parser = argparse.ArgumentParser(description="Look for vulnerabilities in what images install.")
    parser.add_argument(
        "--required", action="store_true", help=f"exit with {UNCHECKED} where nothing was checked"
    )
    args = parser.parse_args(argv)
    packages = locked()
    source = source_of(sources)
    report = ask(source, packages) if source else None
    if report is None:
        print(
            f"audit: NOT CHECKED: {len(packages)} locked packages; no source of advisories answers "
            f"(tried: {', '.join(sources)})"
        )
        return UNCHECKED if args.required else 0
    for name, advisories in sorted(report.vulnerable.items()):
        print(f"audit: {name} {packages[name]}: {', '.join(advisories)}")
    for name in sorted(report.unknown):
        print(f"audit: {name} {packages[name]} is not known to {source} and was not checked")
    checked = len(packages) - len(report.unknown)
    bad = len(report.vulnerable)
    print(f"audit: {checked} locked packages checked by {source}, {bad} with vulnerabilities")
    return FOUND if report.vulnerable else 0


if __name__ == "__main__":
    sys.exit(main())
