"""Compiles the stand-ins for NVIDIA's libraries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def build(folder: Path) -> Path:
    """The library for management, in the folder under the name that the real one has."""
    return _compiled("nvml.c", folder / "libnvidia-ml.so.1")


def build_driver(folder: Path) -> Path:
    """CUDA's driver, whose devices' memory is the host's."""
    return _compiled("cuda.c", folder / "libcuda-stand-in.so")


def _compiled(source: str, made: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = Path(__file__).with_name(source)
    subprocess.run([compiler, "-Wall", "-shared", "-fPIC", "-o", made, path], check=True)
    return made
