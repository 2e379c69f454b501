"""Generates services/batonlm/v1 from protos/baton/v1.

`--check` writes nothing and fails when the committed stubs differ from what the protos give.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
STUBS = Path("services/batonlm/v1")
MODULE = re.compile(r"\bbaton\.v1(?= import|\.\w+_pb2)")
"""How stubs import each other: by the path of the protos. Descriptors have that path on the wire,
but Python finds the package by another name."""
INIT = '"""Generated from protos/baton/v1 by scripts/gen_protos.py. Never edited."""\n'


def generate(out: Path) -> None:
    """Writes messages, their types and the gRPC stubs under `out` (a source root)."""
    protos = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    # The plugins of this very environment, whatever PATH says.
    scripts = Path(sysconfig.get_path("scripts"))
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'protos'}",
            f"--proto_path={well_known}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet:{out}",
            *protos,
        ]
    )
    if code != 0:
        raise SystemExit(code)
    for stub in (out / "baton/v1").iterdir():
        stub.write_text(MODULE.sub("batonlm.v1", stub.read_text()))
    (out / "baton/v1/__init__.py").write_text(INIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the stubs are out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, kept = Path(folder) / "baton/v1", ROOT / STUBS
        if not check:
            kept.mkdir(parents=True, exist_ok=True)
            for old in kept.iterdir():
                if old.is_file():
                    old.unlink()
            for file in fresh.iterdir():
                (kept / file.name).write_bytes(file.read_bytes())
            return
        names = {p.name for p in fresh.iterdir()} | {p.name for p in kept.iterdir() if p.is_file()}
        stale = [n for n in sorted(names) if not _same(fresh / n, kept / n)]
        if stale:
            sys.exit(f"out of date: {', '.join(stale)}; run 'make protos'")


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    main()
