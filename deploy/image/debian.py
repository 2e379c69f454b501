"""Installs the Debian packages of a lock into the image that is being built.

    debian.py LOCK [PLACE]...

Lines of a lock: `from PLACE`, or the SHA-256 of a package, the archive that it is in and its path
there. A place is an address with {archive} and {path} to fill in; the first one that has a file
gives it, those of the command line before those of the lock. The digest decides whether a file is
used, not where it is from. What is installed already, in the lock's version or a newer one, stays.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

DOWNLOAD_TIMEOUT_S = 60
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Dpkg's, which runs what only root has on its path."""


class Package(NamedTuple):
    digest: str
    archive: str
    path: str


def read(text: str) -> tuple[list[str], list[Package]]:
    """Places and packages of a lock."""
    places, packages = [], []
    for line in text.splitlines():
        words = line.split()
        if words[0] == "from":
            places.append(words[1])
        else:
            packages.append(Package(*words))
    return places, packages


def fetch(package: Package, places: Sequence[str]) -> bytes:
    """One file. Raises ValueError where no place has it with the locked digest."""
    faults = []
    for place in places:
        url = place.format(archive=package.archive, path=package.path)
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
                content = bytes(answer.read())
        except OSError as error:
            faults.append(f"{url}: {error}")
            continue
        if hashlib.sha256(content).hexdigest() == package.digest:
            return content
        faults.append(f"{url}: not the file that is locked")
    raise ValueError("; ".join(faults))


def needed(file: Path) -> bool:
    """Whether a package is absent or older than this file's version."""
    name, version = _lines("dpkg-deb", "--show", "--showformat=${Package}\n${Version}", str(file))
    installed = _lines("dpkg-query", "--show", "--showformat=${db:Status-Status}\n${Version}", name)
    if installed[:1] != ["installed"]:
        return True
    older = ("dpkg", "--compare-versions", installed[1], "lt", version)
    return subprocess.run(older, check=False).returncode == 0


def main(lock: str, *places: str) -> int:
    locked_places, packages = read(Path(lock).read_text())
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for package in packages:
            file = Path(folder, unquote(package.path).rsplit("/", 1)[1])
            file.write_bytes(fetch(package, [*places, *locked_places]))
            files.append(file)
        wanted = [str(file) for file in files if needed(file)]
        if wanted:
            subprocess.run(
                ["dpkg", "--install", *wanted], check=True, env=os.environ | {"PATH": PATH}
            )
    return 0


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
