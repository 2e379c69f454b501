"""The tests of the kernels that choose the GPU where there is one, one file for each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

from baton_loadtest.report import Result, at_most
from gpucheck.check import Check, Skip

_CHOSEN = {"cuda": "gpu", "cpu": "not gpu and not deep and not slow"}
_OPTIONS = (
    # What the project's own options need beside pytest is not on every machine.
    *("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="),
    *("-q", "-p", "no:cacheprovider"),
)


class _Outcomes:
    """A plugin that counts how tests ended."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: object) -> None:
        """A test ends with its call, or fails or is skipped before or after it."""
        outcome = str(getattr(report, "outcome", ""))
        if getattr(report, "when", "") == "call" or outcome != "passed":
            self.counts[outcome] += 1


def run(check: Check) -> Iterator[Result]:
    """How many tests of the part's file pass and fail. pytest prints why."""
    for package in ("pytest", "hypothesis"):
        if find_spec(package) is None:
            raise Skip(f"{package} is not installed here")
    import pytest

    outcomes = _Outcomes()
    chosen = ["-m", _CHOSEN[check.device]]
    code = pytest.main([f"tests/engine/{check.part}.py", *chosen, *_OPTIONS], [outcomes])
    counts = outcomes.counts
    yield at_most(f"tests failed, {check.part}", counts["failed"], "tests", 0)
    yield Result(f"tests passed, {check.part}", counts["passed"], "tests")
    if code > pytest.ExitCode.TESTS_FAILED or not counts["passed"]:
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")
