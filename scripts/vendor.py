"""Copies the chat page's one library from its npm package, as deploy/locks/page.json pins it.

    vendor.py                    copy the pinned version again
    vendor.py --version 18.3.0   pin another version, and copy it

Needs npm and its registry. The package has to have the pinned SHA-512; nothing of it is run. The
lock has the SHA-256 of each copied file, too, so that tests compare without a network.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy" / "locks" / "page.json"
VENDOR = ROOT / "services" / "batonlm" / "router" / "api" / "http" / "page" / "vendor"
TIMEOUT_S = 300


def locked() -> dict[str, Any]:
    """Returns the lock: name, version, license, integrity (as npm writes it), and files, each with
    its `source` in the package and its `sha256`."""
    lock: dict[str, Any] = json.loads(LOCK.read_text())
    return lock


def faults(folder: Path = VENDOR) -> Iterator[str]:
    """Yields each file of the folder that is not the one that is locked."""
    files = locked()["files"]
    for path in folder.iterdir():
        if path.name not in files:
            yield f"{path.name} is not in {LOCK.name}"
    for name, file in files.items():
        path = folder / name
        if not path.exists():
            yield f"{name} is not there"
        elif _sha256(path.read_bytes()) != file["sha256"]:
            yield f"{name} is not the file of {LOCK.name}"


def copy(package: Path, lock: dict[str, Any], folder: Path = VENDOR) -> None:
    """Copies the files of a package, and writes their SHA-256 into the lock. Raises ValueError for
    a package that is not the locked one."""
    integrity = integrity_of(package)
    if integrity != lock["integrity"]:
        raise ValueError(f"{package.name} is {integrity}, and {lock['integrity']} is locked")
    with tarfile.open(package) as archive:
        for name, file in lock["files"].items():
            member = archive.extractfile(f"package/{file['source']}")
            assert member is not None
            content = member.read()
            file["sha256"] = _sha256(content)
            (folder / name).write_bytes(content)


def integrity_of(package: Path) -> str:
    digest = hashlib.sha512(package.read_bytes()).digest()
    return f"sha512-{base64.b64encode(digest).decode()}"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy the chat page's library from npm.")
    parser.add_argument("--version", help="pin this one")
    args = parser.parse_args(argv)
    lock = locked()
    wanted = args.version or lock["version"]
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"{lock['name']}@{wanted}"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            print(f"vendor: {done.stderr.strip()}", file=sys.stderr)
            return 1
        package = Path(folder) / done.stdout.split()[-1]
        if wanted != lock["version"]:
            lock |= {"version": wanted, "integrity": integrity_of(package)}
        try:
            copy(package, lock)
        except ValueError as error:
            print(f"vendor: {error}", file=sys.stderr)
            return 1
    LOCK.write_text(json.dumps(lock, indent=2) + "\n")
    print(f"{lock['name']} {wanted}: {', '.join(lock['files'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
