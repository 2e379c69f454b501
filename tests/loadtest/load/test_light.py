"""The light image has what a load test needs."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import baton_loadtest.load

HEAVY = ("torch", "numpy", "matplotlib", "nixl", "transformers", "cryptography", "kubernetes")


def test_it_loads_without_what_only_other_images_have() -> None:
    names = [each.name for each in pkgutil.iter_modules(baton_loadtest.load.__path__)]
    assert "command" in names
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
        "import baton_loadtest.drive, baton_loadtest.report\n"
        + "".join(f"import baton_loadtest.load.{name}\n" for name in names)
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
