"""Prints as JSON what an image has: its Python, its Python packages, its Debian packages.

    inventory.py BASE    the image that it was built from

Runs in the image itself with nothing but the standard library. Licences are what the packages say.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

DPKG = Path("/var/lib/dpkg/status")
COPYRIGHT = "/usr/share/doc/{}/copyright"
RELEASE = Path("/etc/os-release")
_DEP5 = re.compile(r"Format: *https?://www.debian.org/doc/packaging-manuals/copyright-format")


def python_packages(folder: Path) -> Iterator[dict[str, object]]:
    """Of one folder of packages."""
    for distribution in distributions(path=[str(folder)]):
        about = distribution.metadata
        yield {
            "name": about["Name"],
            "version": distribution.version,
            "expression": (about.get_all("License-Expression") or [None])[0],
            "license": (about.get_all("License") or [None])[0],
            "classifiers": [
                one
                for one in about.get_all("Classifier") or []
                if one.startswith("License :: OSI Approved :: ")
            ],
            "sha256": _built_here(distribution),
        }


def debian_packages(status: str, copyright_of: str = COPYRIGHT) -> Iterator[dict[str, object]]:
    """Of dpkg's own table; those that are installed."""
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            yield {
                "name": fields["Package"],
                "version": fields["Version"],
                "architecture": fields["Architecture"],
                "licenses": _debian_licenses(Path(copyright_of.format(fields["Package"]))),
            }


def main(base: str) -> int:
    release = RELEASE.read_text() if RELEASE.exists() else ""
    inventory = {
        "base": base,
        "python": {"version": platform.python_version(), "prefix": sys.base_prefix},
        "os": dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', release, re.MULTILINE)),
        "python_packages": list(python_packages(_site(sys.prefix))),
        "base_python_packages": list(python_packages(_site(sys.base_prefix))),
        "debian_packages": list(debian_packages(DPKG.read_text() if DPKG.exists() else "")),
    }
    json.dump(inventory, sys.stdout, indent=1)
    return 0


def _site(prefix: str) -> Path:
    return Path(prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")


def _built_here(distribution: Distribution) -> str | None:
    """The SHA-256 of the wheel that a package was installed from by its file, not from an index."""
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    method, _, digest = direct.get("archive_info", {}).get("hash", "").partition("=")
    return digest if method == "sha256" else None


def _debian_licenses(file: Path) -> list[str]:
    """Debian's short names, where the file is in its machine-readable form."""
    text = file.read_text(errors="replace") if file.is_file() else ""
    if not _DEP5.match(text):
        return []
    return sorted(set(re.findall(r"^License: *(\S.*?)\s*$", text, re.MULTILINE)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
