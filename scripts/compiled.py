"""Compiles the modules that work for each sequence of each step, for a wheel of one platform.

A build hook of hatchling, off unless HATCH_BUILD_HOOK_ENABLE_CUSTOM is set, as `make compiled`
does. mypyc makes extension modules of the same sources. In the wheel they lie beside the sources
and are imported instead of them; an interpreter that cannot load them imports the sources. Where
what compiles them is missing, the wheel is as it is without the hook, and a line says so.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "batonlm"
"""Names the extension module that has the code of all of them."""

TYPES = """\
[mypy]
mypy_path = services:loadtest
explicit_package_bases = True
[mypy-batonlm.llm]
follow_imports = skip
"""
"""mypy's configuration. `batonlm/__init__.pyi` names `batonlm.llm`, whose imports end at torch."""


class CompiledModules(BuildHookInterface[BuilderConfig]):
    """Its option `modules` names the sources, from the project's root."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if missing := missing_tools():
            self.app.display_warning(f"No module is compiled: {missing} is missing.")
            return
        self._folder = tempfile.TemporaryDirectory()
        made = compile_modules(Path(self.root), self.config["modules"], Path(self._folder.name))
        files = [file for file in made.rglob("*") if file.is_file()]
        build_data["force_include"] |= {str(one): str(one.relative_to(made)) for one in files}
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def missing_tools() -> str:
    """Returns what of mypyc, a C compiler and Python's headers is missing first, or ""."""
    for module in ("mypyc", "setuptools"):
        if find_spec(module) is None:
            return module
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"the C compiler {compiler}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else str(header)


def compile_modules(root: Path, modules: Sequence[str], folder: Path) -> Path:
    """Returns a folder within `folder` that has the extension modules as a wheel has them.

    The environment's MYPYC_OPT_LEVEL, 3 if it is not set, is how much the C compiler optimizes.
    Raises SystemExit for sources that mypy refuses, and setuptools' CompileError.
    """
    # Only who compiles has these.
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    types, before = folder / "mypy.ini", Path.cwd()
    types.write_text(TYPES)
    os.chdir(root)
    try:
        extensions = mypycify(
            [f"--config-file={types}", *modules],
            target_dir=str(folder / "c"),
            group_name=LIBRARY,
            opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
            debug_level="0",
        )
        build = build_ext(Distribution({"name": LIBRARY, "ext_modules": extensions}))
        build.build_lib, build.build_temp = str(folder / "made"), str(folder / "objects")
        build.ensure_finalized()
        build.run()
    finally:
        os.chdir(before)
    return folder / "made"
