"""The GPU check: its parent with real processes, its arithmetic, and a rehearsal on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import gpu_check
from baton_loadtest.report import Result
from batonlm.core.errors import InvalidArgument
from batonlm.engine.gpus import Driver, Gpu
from batonlm.testing.fake_runner import FakeRunner
from gpucheck import figures, kernels, sections, strip_nixl
from gpucheck.check import Check
from gpucheck.driving import generate
from gpucheck.sections import SECTIONS, Section
from tests.engine import driving
from tests.engine.devices import CUDA, INTERPRETER
from tests.engine.driving import random_prompts

ROOT = Path(gpu_check.__file__).resolve().parents[1]


def test_weights_and_kv_of_a_known_model() -> None:
    shape = figures.LLAMA_8B
    # 8.03 billion parameters, of which the embedding table is not read whole in a step.
    assert shape.step_weights + shape.vocab * shape.hidden == pytest.approx(8.03e9, rel=1e-3)
    assert shape.kv_elements * 2 == 131072
    one = figures.decode_bytes(shape, 1, 1000, 2)
    assert one == 2 * shape.step_weights + 131072 * 1000
    assert figures.decode_bytes(shape, 64, 1000, 2) - one == 63 * 131072 * 1000


def test_operations_of_chunks_add_up() -> None:
    shape = figures.Shape(2, 8, 16, 2, 1, 4, 32)
    head = 2 * shape.hidden * shape.vocab
    whole = figures.prefill_flops(shape, 48, 0) - head
    parts = [figures.prefill_flops(shape, 16, first) - head for first in (0, 16, 32)]
    assert sum(parts) == whole
    assert parts[0] < parts[1] < parts[2]


def test_medians_and_agreement() -> None:
    assert figures.median([5.0, 1.0, 2.0]) == 2.0
    assert figures.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert figures.first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert figures.first_difference([1, 2], [1, 2]) is None
    assert figures.agreement([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == (3, 5)


def test_a_runner_is_driven_with_steps_ahead() -> None:
    prompts = random_prompts((5, 21, 40), 2048)
    wanted = driving.generate(FakeRunner(), prompts, driving.together(3, 4), 6)
    assert generate(FakeRunner(depth=2), prompts, 6, chunk=16) == wanted


def test_a_share_is_judged_on_a_gpu_only() -> None:
    known = {"ceiling": 10.0}
    assert Check(known=known).speed("x", 7.0, "B/s", "ceiling", 0.8).met is False
    assert Check(known=known).speed("x", 8.0, "B/s", "ceiling", 0.8).met is True
    assert Check(device="cpu", known=known).speed("x", 7.0, "B/s", "ceiling", 0.8).met is None
    # What it would be a share of was not measured.
    assert Check().speed("x", 7.0, "B/s", "ceiling", 0.8).ratio is None
    assert Check().duration("x", 0.3, "ms", 0.2).met is False


def section(name: str, limit_s: float = 60.0, **fields: Any) -> Section:
    made = Section(name, "A", f"tests.engine.gpu_sections:{name}", "", 0.0, limit_s)
    return replace(made, **fields)


class Run:
    """The parent over sections of our own."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path = path
        self._options = gpu_check.Options("cpu", quick=True, jobs=2, cache=cache)

    def __call__(self, *chosen: Section, budget_s: float = 300.0, device: str = "cpu") -> bool:
        processes = gpu_check.Processes()
        report = gpu_check.Report(self.path, self._options, {"kind": device})
        try:
            return gpu_check.run(chosen, report, self._options, budget_s, processes)
        finally:
            processes.close()

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    @property
    def names(self) -> list[str]:
        return [result["name"] for result in self.said["results"]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    yield Run(tmp_path / "gpu.json", tmp_path / "cache")


@pytest.mark.deep
def test_each_part_fails_alone_and_keeps_what_it_measured(run: Run) -> None:
    # Of which its start is a part.
    hanging = section("hangs", limit_s=10.0)
    assert not run(section("crashes"), hanging, section("raises"), section("good"))
    states = {name: found["state"] for name, found in run.said["sections"].items()}
    assert states == {
        "crashes": "crashed",
        "hangs": "timed out",
        "raises": "failed",
        "good": "done",
    }
    parts = {name: found["parts"].get("", {}) for name, found in run.said["sections"].items()}
    assert parts["crashes"]["reason"] == "SIGSEGV"
    assert parts["raises"]["reason"] == "ValueError: no such kernel"
    # Where it stood.
    assert "gpu_sections.py" in parts["hangs"]["tail"] and "hangs" in parts["hangs"]["tail"]
    assert run.names == ["before it crashed", "before it hung", "before it raised", "speed"]
    # A part's own processes end with it.
    pid = int(next(r["value"] for r in run.said["results"] if r["name"] == "before it hung"))
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return "Z"


def test_a_run_goes_on_where_one_ended(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(section("good"), section("raises"))
    assert not run(section("good"), section("raises"), section("slow"))
    assert capsys.readouterr().out.count("measured before") == 1
    # Of the failed section only the later attempt counts, and what others compare with is known.
    assert run.names == ["speed", "before it raised", "share"]
    share = run.said["results"][-1]
    assert (share["section"], share["against"], share["ratio"]) == ("slow", 3.0, 1 / 3)
    # Another device's figures are none of ours.
    assert run(section("good"), device="another")
    assert run.names == ["speed"]


def test_what_does_not_fit_the_budget_is_left_out_and_said(run: Run) -> None:
    assert not run(section("slow", expected_s=1000.0), section("good"))
    assert run.said["sections"]["slow"]["state"] == "no time"
    assert "takes about 1000 s" in run.said["sections"]["slow"]["parts"][""]["reason"]
    assert run.said["sections"]["good"]["state"] == "done"
    # Nor does it take the place of what an earlier run measured.
    assert not run(section("raises"))
    assert not run(section("raises"), section("slow"), budget_s=1.0)
    assert run.said["sections"]["raises"]["state"] == "failed"
    assert run.names == ["speed", "before it raised"]


def test_what_cannot_run_here_is_no_failure(run: Run) -> None:
    assert run(section("skips"), section("good", parts=("one", "two"), together=True))
    assert run.said["sections"]["skips"]["parts"][""]["reason"] == "it is not installed here"
    assert run.names == ["speedone", "speedtwo"]


def test_a_missed_goal_is_no_success(run: Run) -> None:
    report = gpu_check.Report(run.path, gpu_check.Options("cpu", True, 1, run.path), {})
    assert not gpu_check.judge([section("good")], report)
    good = Result("speed", 1.0, "B/s", goal=2.0, met=True)
    report.add("good", {"": gpu_check.Outcome("done", results=[good])})
    assert gpu_check.judge([section("good")], report)
    report.add("good", {"": gpu_check.Outcome("done", results=[replace(good, met=False)])})
    assert not gpu_check.judge([section("good")], report)


@pytest.mark.deep
def test_a_run_that_is_ended_leaves_no_process_behind(tmp_path: Path) -> None:
    code = """
import sys, gpu_check
from gpucheck.sections import Section
gpu_check.SECTIONS = (Section("hangs", "A", "tests.engine.gpu_sections:hangs", "", 0.0, 500.0),)
sys.exit(gpu_check.main(["--device", "cpu", "--json", sys.argv[1]]))
"""
    environment = gpu_check.environment(gpu_check.Options("cpu", True, 1, tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (hanging := _running("gpucheck.child", parent.pid)):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        parent.terminate()
        assert parent.wait(120) == 128 + signal.SIGTERM
        assert [pid for pid in hanging if Path(f"/proc/{pid}").exists()] == []
    finally:
        parent.kill()
        parent.wait()


def _running(module: str, parent: int) -> list[str]:
    """The children of a process that run a module."""
    found = []
    for child in psutil.Process(parent).children():
        # One may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(str(child.pid))
    return found


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_check.py"), "A", "--json", str(path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout
    assert "no GPU" in done.stderr
    assert not path.exists()


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, gpu_check; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "services")])
    environment = {**os.environ, "PYTHONPATH": paths}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


ON_THE_MACHINE = {
    *("torch", "torchgen", "triton", "transformers", "numpy", "tokenizers", "safetensors"),
    *("huggingface_hub", "xxhash", "google", "nixl", "jinja2", "tqdm", "packaging"),
}
"""What a bare machine has or is brought: packages that our code may import there. Beside them come
those that these import by themselves."""


@pytest.mark.deep
def test_sections_import_only_what_a_bare_machine_has() -> None:
    modules = sorted({s.run.partition(":")[0] for s in SECTIONS})
    code = f"""
import importlib, sys, torch, triton, transformers
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaForCausalLM
before = set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""
    environment = gpu_check.environment(gpu_check.Options("cpu", True, 1, ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {"batonlm", "baton_loadtest", "gpucheck", "tests"}
    found = {name for name in done.stdout.split() if not name.startswith("_")}
    assert found - ours - ON_THE_MACHINE - set(sys.stdlib_module_names) == set()


def test_the_table_names_what_there_is() -> None:
    assert len({s.name for s in SECTIONS}) == len(SECTIONS)
    cases = {part.partition(", ")[2] for s in SECTIONS if s.name == "kernels" for part in s.parts}
    assert cases == {case.name for case in kernels.CASES}
    with_a_gpu = {
        p.stem for p in Path(__file__).parent.glob("test_*.py") if "CUDA" in p.read_text()
    }
    assert set(sections.TESTED) == with_a_gpu - {Path(__file__).stem}
    for command in "ABC":
        expected = sum(s.expected_s for s in SECTIONS if s.command == command)
        assert expected + SECTIONS[0].expected_s <= gpu_check.COMMAND_S, command


def test_everything_fits_what_may_travel() -> None:
    """64 MiB, of which a stripped NIXL takes 33."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.exists()) < 28 * 2**20


@pytest.mark.parametrize("device", [CUDA, INTERPRETER])
def test_kernels_are_held_against_float64(device: str) -> None:
    case = kernels.Case("small", heads=4, kv_heads=2, size=16, window=20, sinks=True)
    assert kernels.error_of(case, "float32", device, ((0, 20), (17, 1), (30, 5))) < 1e-4


@pytest.mark.deep
def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention", lambda *args, **fields: torch.zeros(1))
    case = kernels.Case("small", heads=4, kv_heads=2, size=16)
    assert kernels.error_of(case, "float32", "cpu", ((0, 20),)) > 1


@pytest.mark.deep
def test_a_stripped_nixl_moves_kv(tmp_path: Path) -> None:
    """It is small, imports, and passes the transports' contract in place of the whole one."""
    folder = tmp_path / "carried"
    script = str(ROOT / "scripts/gpucheck/strip_nixl.py")
    subprocess.run([sys.executable, script, "--out", str(folder)], check=True)
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 36 * 2**20
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    code = "import nixl, google.protobuf; print(nixl.__file__, google.protobuf.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert found.count(str(folder)) == 2
    contract = [sys.executable, "-m", "pytest", "-q", "-k", "nixl"]
    done = subprocess.run(
        [*contract, "tests/kv/test_transport_contract.py"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_what_is_no_nixl_is_not_stripped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert strip_nixl.main(["--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "there is no nixl/*.py" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


REHEARSAL = """
import json, sys
from pathlib import Path
from gpucheck import child
from gpucheck.sections import SECTIONS

folder, chosen, known = Path(sys.argv[1]), sys.argv[2:], {}
for section in SECTIONS:
    if section.name not in chosen:
        continue
    part, *_ = section.quick_parts or section.parts
    given, out = folder / "known", folder / section.name
    given.write_text(json.dumps(known))
    words = ["--part", part, "--device", "cpu", "--quick"]
    child.main([section.run, *words, "--known", str(given), "--out", str(out)])
    found = [json.loads(line) for line in out.read_text().splitlines()]
    known |= {each["name"]: each["value"] for each in found if "skipped" not in each}
"""
"""The first part of every chosen section, all in one process: the interpreter takes long for each,
and what the other parts compute has tests of its own."""
LONG = {
    *("speed", "handover", "parity", "tests", "agreement", "large batches", "long context"),
    *("other parity", "lora"),
}
"""Sections that the interpreter takes long for. The others share most of their code."""
COMPARED = {"kernel speed", "fused kernels", "packing", "swap"}
"""Sections that compare something with the ceilings."""
COMPARED_TOO = {
    *("speed", "transformers", "variants", "handover", "large batches", "long context"),
    *("mixed steps", "lora"),
}
"""Those that do so, or compare with the speed, when all are there."""


@pytest.mark.deep
def test_quick_sections_run_to_their_end_on_a_cpu(tmp_path: Path) -> None:
    names = {section.name for section in SECTIONS} - LONG
    assert rehearse(tmp_path, names) >= COMPARED


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    names = {section.name for section in SECTIONS}
    assert rehearse(tmp_path, names) >= COMPARED | COMPARED_TOO


def rehearse(tmp_path: Path, names: set[str]) -> set[str]:
    """Runs sections. Returns those that compared something with an earlier figure: it is not there
    where that figure has another name by now."""
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL, str(tmp_path), *names],
        env=gpu_check.environment(gpu_check.Options("cpu", True, 1, tmp_path / "cache")),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [
        {"section": name, **json.loads(line)}
        for name in names
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert {each["section"] for each in said} == names
    skipped = {each["section"] for each in said if "skipped" in each}
    assert skipped == ({"vllm"} if find_spec("vllm") is None else set())
    results = [
        Result(**{k: v for k, v in e.items() if k != "section"}) for e in said if "skipped" not in e
    ]
    assert all(result.met is not False for result in results)
    return {each["section"] for each in said if each.get("against") is not None}


def test_one_gpu_of_several_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "H100", 80 << 30, 79 << 30) for i in range(4))
    monkeypatch.setattr("gpu_check.find_driver", lambda: Driver("580", gpus))
    for device, limit, chosen in (("cuda", "3,2", "GPU-3"), ("cuda:1", "3,2", "GPU-2")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", limit)
        assert gpu_check.expose(device) == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    assert gpu_check.expose("cpu") == "cpu"
    with pytest.raises(InvalidArgument):
        gpu_check.expose("cuda:4")
