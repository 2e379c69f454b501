"""Copies what moves KV over UCX out of a NIXL wheel, small enough to be carried to a GPU machine.

    python scripts/gpucheck/strip_nixl.py [--from SITE_PACKAGES | --from A.whl B.whl] [--out FOLDER]

Kept are the Python bindings, NIXL's UCX plugin, UCX's modules for shared memory and CUDA, the
libraries that these need, and protobuf's runtime, which Baton's messages need at a version of its
own. Symbols that nothing links to are removed where `strip` is installed. The folder goes on
PYTHONPATH; `gpu_check.py` does that for `.gpucheck/` in this checkout.

Bindings are compiled for one version of Python. For another one than this, give wheels:
    pip download --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 -d wheels nixl==1.5.1 nixl-cu13==1.5.1
    python scripts/gpucheck/strip_nixl.py --from wheels/*.whl
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / ".gpucheck"

_PYTHON = ("nixl/*.py", "nixl_meta_utils.py", "nixl_cu13/*.py", "nixl_cu13/_*.so")
_PLUGINS = (
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
    "nixl_cu13.libs/ucx/libucm_cuda.so*",
    "nixl_cu13.libs/ucx/libuct_cma.so*",
    "nixl_cu13.libs/ucx/libuct_cuda.so*",
)
"""Libraries that are loaded by name at run time, so that nothing links to them."""
_LIBRARIES = (".nixl_cu13.mesonpy.libs", "nixl_cu13.libs")
"""Folders in which what is linked to lies."""
_PROTOBUF = ("google/protobuf/**/*.py", "google/_upb/*")


class Incomplete(Exception):
    """What was given is no NIXL for CUDA 13. The message says what is missing."""


def strip(source: Path, target: Path) -> None:
    """Copies NIXL from `source`, laid out like site-packages, to `target`, which is made anew.

    Raises Incomplete naming what `source` lacks.
    """
    wanted = set(_find(source, (*_PYTHON, *_PLUGINS)))
    pending = [path for path in wanted if ".so" in path.name]
    while pending:
        for linked in _linked(source, pending.pop()) - wanted:
            wanted.add(linked)
            pending.append(linked)
    shutil.rmtree(target, ignore_errors=True)
    _copy(source, target, wanted)


def add_protobuf(target: Path) -> None:
    """Adds this environment's protobuf, whose compiled part suits every Python from 3.10 on."""
    source = installed("google.protobuf").parent
    _copy(source, target, _find(source, _PROTOBUF))


def installed(package: str) -> Path:
    """The folder on Python's path that a package lies in; the package is not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise Incomplete(f"{package} is not installed here")
    return Path(spec.origin).parents[1]


def _find(source: Path, patterns: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        here = sorted(source.glob(pattern))
        if not here:
            raise Incomplete(f"there is no {pattern} in {source}")
        found += here
    return found


def _linked(source: Path, library: Path) -> set[Path]:
    """What of the wheel's own libraries a library links to."""
    done = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True)
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)
    places = (source / folder / name for name in names for folder in _LIBRARIES)
    return {place for place in places if place.exists()}


def _copy(source: Path, target: Path, wanted: Iterable[Path]) -> None:
    tool = shutil.which("strip")
    for path in sorted(wanted):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
        if tool and ".so" in path.name:
            subprocess.run([tool, "--strip-unneeded", str(place)], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        nargs="+",
        help="wheels, or a folder like site-packages; the default is this environment's",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT, help=f"default: {DEFAULT.name}/")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            source = chosen.source[0] if chosen.source else installed("nixl")
            if not source.is_dir():
                source = Path(unpacked)
                for wheel in chosen.source:
                    zipfile.ZipFile(wheel).extractall(source)
            strip(source, chosen.out)
            add_protobuf(chosen.out)
        except Incomplete as error:
            print(f"strip_nixl: {error}", file=sys.stderr)
            return 2
    size = sum(path.stat().st_size for path in chosen.out.rglob("*") if path.is_file())
    print(f"{chosen.out.name}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
