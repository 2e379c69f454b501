"""The wheel with compiled modules, which pass the tests of their sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from compiled import missing_tools
from tests.deploy.test_images import PROJECT

ROOT = Path(__file__).resolve().parents[2]
SOURCES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
MODULES = ["/".join(Path(source).parts[1:]).removesuffix(".py") for source in SOURCES]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
TESTS = (
    "block_pool", "pool_machine", "cached_units", "cache_events", "prefix", "swap_space",
    "sequence", "stop_rule", "decode_hold", "decode_machine", "decode_priority", "decode_reserve",
    "decode_scheduler", "decode_swap", "prefill_machine", "prefill_scheduler", "swap_in_flight",
    "scored_inputs", "grammar_rows", "loop", "turns", "deficits", "step_cost",
)  # fmt: skip

LIMIT_S = 900
"""Of a build, on a machine that has much else to do."""

pytestmark = [pytest.mark.deep, pytest.mark.timeout(2 * LIMIT_S)]


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(folder: Path, **variables: str) -> tuple[Path, str]:
    """Returns the wheel that is asked to have compiled modules, and what the build printed."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    said = run(*command, HATCH_BUILD_HOOK_ENABLE_CUSTOM="true", **variables)
    return next(folder.glob("*.whl")), said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := missing_tools():
        pytest.skip(f"{missing} is missing")
    # The same C, in half of the time that it takes to optimize it fully.
    return build(tmp_path_factory.mktemp("wheel"), MYPYC_OPT_LEVEL="1")[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_extension_modules_beside_their_sources(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-" in wheel.name
    names = set(ZipFile(wheel).namelist())
    assert {f"{module}.py" for module in MODULES} <= names
    made = {name for name in names if name.endswith(".so")}
    assert made == {f"{module}{SUFFIX}" for module in MODULES} | {f"batonlm__mypyc{SUFFIX}"}


def test_without_a_compiler_the_wheel_is_pure_python_and_says_so(tmp_path: Path) -> None:
    wheel, said = build(tmp_path, CC="/no/compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]
    assert said.count("No module is compiled: the C compiler /no/compiler is missing.") == 1


def test_tests_of_the_sources_pass_on_what_is_compiled(installed: Path) -> None:
    where = {"PYTHONPATH": str(installed), "BATON_DEEP": "0"}
    names = [module.replace("/", ".") for module in MODULES]
    program = f"import {', '.join(names)}; print({', '.join(f'{name}.__file__' for name in names)})"
    files = run(sys.executable, "-c", program, **where)
    assert files.split() == [str(installed / f"{module}{SUFFIX}") for module in MODULES]
    tests = [f"tests/core/test_{name}.py" for name in TESTS]
    said = run(
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, **where
    )
    assert " passed" in said and "failed" not in said


def test_sources_are_imported_where_extension_modules_are_anothers(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copytree(
        installed, tmp_path, ignore=shutil.ignore_patterns("models"), dirs_exist_ok=True
    )
    for made in tmp_path.rglob("*.so"):
        made.rename(made.with_name(made.name.replace(SUFFIX, ".cpython-300-other.so")))
    program = "import batonlm.core.scheduler.scheduler as s; print(s.__file__)"
    said = run(sys.executable, "-c", program, PYTHONPATH=str(tmp_path))
    assert said.strip() == str(tmp_path / "batonlm/core/scheduler/scheduler.py")


def test_simulation_and_benchmark_run_on_what_is_compiled(installed: Path, tmp_path: Path) -> None:
    baton = (sys.executable, "-m", "batonlm.cli.main")
    command = (*baton, "simulate", "--seconds", "10", "--requests")
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    run(*command, plain)
    run(*command, compiled, PYTHONPATH=str(installed))
    assert plain.read_text() == compiled.read_text()
    few = ("--rounds", "1", "--sequences", "8", "--compiled", installed)
    assert "compiled" in run(*baton, "bench", "compiled", *few)
