"""`baton bench engine` against llama.cpp, whose library comes prebuilt with a package of npm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import INSTALL_S, RUN_S, install

pytestmark = pytest.mark.clients

LIBRARY = "@node-llama-cpp/linux-x64"
GGUF = ("gguf", "tqdm", "pyyaml", "requests")
"""With what it requires of packages that are not here, but not numpy."""


@pytest.mark.timeout(INSTALL_S + RUN_S)
def test_llama_takes_part_in_every_precision(tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    node, packages, file = tmp_path / "node", tmp_path / "packages", tmp_path / "figures.json"
    node.mkdir()
    install("npm", "install", "--prefix", node, "--no-audit", "--no-fund", LIBRARY)
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages)
    install(*pip, *GGUF)
    library = node / "node_modules" / LIBRARY / "bins/linux-x64"
    few = ("--shape", "tiny", "--requests", "4", "--rounds", "1", "--peers", "--threads", "1")
    where = ("--llama", str(library), "--json", str(file))
    paths = os.pathsep.join([*filter(None, sys.path), str(packages)])
    subprocess.run(
        [sys.executable, "-m", "batonlm.cli.main", "bench", "engine", *few, *where],
        env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        check=True,
        timeout=RUN_S,
        stdin=subprocess.DEVNULL,
    )
    found = {result["name"]: result["value"] for result in json.loads(file.read_text())["results"]}
    sizes = [found[f"llama.cpp {name}: weights"] for name in ("q4_0", "q8_0", "float16")]
    assert 0 < sizes[0] <= sizes[1] < sizes[2]
    # Rounding parts the others' tokens sooner or later, and not at the first one.
    name = "llama.cpp float16: tokens until they differ, mean"
    assert found.get(name, float("inf")) > 4
