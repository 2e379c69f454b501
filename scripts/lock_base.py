"""Pins what the images stand on: the base image by its digest, the compiler by its Debian packages.

    lock_base.py image      write today's digest of the base image's tag into the Dockerfile
    lock_base.py compiler   write deploy/locks/engine-gpu.debian.txt

The first takes docker, skopeo or crane, and the image's registry; the second apt, and Debian's
archive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPILER = ROOT / "deploy" / "locks" / "engine-gpu.debian.txt"
PLATFORM = ("linux", "amd64")
"""Of the locks' wheels and packages; a base image has to be there for it."""
SUITE = "bookworm"
"""Debian's release in the base image."""
ASKED = ("gcc", "libc6-dev")
"""What Triton needs to compile the launchers of its kernels."""
ARCHIVES = {"debian": SUITE, "debian-security": f"{SUITE}-security"}
MIRROR = "https://deb.debian.org"
SNAPSHOT = "https://snapshot.debian.org/archive"
"""Keeps every file that the archive ever had; the archive itself drops what is superseded."""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TIMEOUT_S = 300

_BASE = re.compile(
    r"^ARG PYTHON=(?P<tag>[^@\s]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?$", re.MULTILINE
)
_FILE = re.compile(r"'[^']*?/([^/']+)/(pool/[^']+)' \S+ \d+ SHA256:([0-9a-f]{64})")

READERS = (
    ("docker", "buildx", "imagetools", "inspect", "--raw"),
    ("skopeo", "inspect", "--raw"),
    ("crane", "manifest"),
)
"""Commands that print an image's manifest as it lies in the registry."""


def base_of(dockerfile: str) -> tuple[str, str | None]:
    """The base image's tag, and its digest where it is pinned."""
    found = _BASE.search(dockerfile)
    if found is None:
        raise ValueError("the Dockerfile has no line ARG PYTHON=…")
    return found["tag"], found["digest"]


def digest_of(manifest: bytes) -> str:
    """The digest of an index of images. Raises ValueError where the platform is not in it."""
    platforms = [one.get("platform", {}) for one in json.loads(manifest).get("manifests", [])]
    if PLATFORM not in [(one.get("os"), one.get("architecture")) for one in platforms]:
        raise ValueError(f"there is no image for {'/'.join(PLATFORM)}")
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def pin_image(dockerfile: str, digest: str) -> str:
    tag, _ = base_of(dockerfile)
    return _BASE.sub(f"ARG PYTHON={tag}@{digest}", dockerfile, count=1)


def manifest_of(tag: str) -> bytes:
    """Raises RuntimeError where no tool gets it from the registry."""
    for command in READERS:
        if shutil.which(command[0]):
            image = f"docker://{tag}" if command[0] == "skopeo" else tag
            read = subprocess.run([*command, image], capture_output=True, timeout=TIMEOUT_S)
            if read.returncode == 0:
                return read.stdout
    raise RuntimeError(f"no docker, skopeo or crane that reads {tag} from its registry")


def compiler_lock(now: datetime) -> str:
    """All packages that the compiler needs, also those that a base image has."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (root / name).mkdir(parents=True)
        (root / "status").write_text("")
        (root / "sources.list").write_text(
            "".join(
                f"deb [signed-by={KEYRING}] {MIRROR}/{archive} {suite} main\n"
                for archive, suite in ARCHIVES.items()
            )
        )
        settings = {
            "Dir::State": root / "state",
            "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache",
            "Dir::Etc::sourcelist": root / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": PLATFORM[1],
            "APT::Sandbox::User": "root",
            "Acquire::ForceHash": "SHA256",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        subprocess.run([*apt, "update"], check=True, timeout=TIMEOUT_S)
        uris = subprocess.run(
            [*apt, "install", "--no-install-recommends", "--print-uris", *ASKED],
            capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
        ).stdout  # fmt: skip
    day = now.strftime("%Y%m%dT%H%M%SZ")
    places = [f"{MIRROR}/{{archive}}/{{path}}", f"{SNAPSHOT}/{{archive}}/{day}/{{path}}"]
    lines = [f"from {place}" for place in places]
    for line in sorted(uris.splitlines()):
        found = _FILE.fullmatch(line)
        if found is None:
            raise ValueError(f"not a package with its SHA-256: {line}")
        archive, path, digest = found.groups()
        lines.append(f"{digest} {archive} {path}")
    return "".join(f"{line}\n" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pin what the images stand on.")
    parser.add_argument("what", choices=("image", "compiler"))
    what = parser.parse_args(argv).what
    try:
        if what == "compiler":
            if shutil.which("apt-get") is None:
                raise RuntimeError("takes apt: run it on Debian")
            COMPILER.write_text(compiler_lock(datetime.now(UTC)))
            return 0
        text = DOCKERFILE.read_text()
        tag, before = base_of(text)
        digest = digest_of(manifest_of(tag))
        DOCKERFILE.write_text(pin_image(text, digest))
        print(f"{tag}: {digest}, as before" if digest == before else f"{tag}: {digest}")
    except (RuntimeError, ValueError, subprocess.SubprocessError) as error:
        print(f"lock_base: {error}; nothing changed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
