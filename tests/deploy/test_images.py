"""What can be said of the images without a builder: who runs in them, and what goes into them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import lock_images
from tests.deploy.dockerfile import Dockerfile

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILE = Dockerfile(DEPLOY / "Dockerfile")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = tuple(lock_images.IMAGES)
VENV = "/opt/baton"
TORCH = re.findall(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]


def copies(target: str, *, of_context: bool) -> list[list[str]]:
    found = [words.split() for words in FILE.stages[target].of("COPY")]
    return [words for words in found if words[0].startswith("--from=") != of_context]


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root_and_only_tmp_is_written_to(target: str) -> None:
    assert FILE.last(target, "USER") == "65532:65532"
    environment = FILE.pairs(target, "ENV")
    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["PATH"].split(":")[0] == f"{VENV}/bin"


@pytest.mark.parametrize("target", TARGETS)
def test_process_1_passes_signals_on_and_comes_from_a_pinned_package(target: str) -> None:
    entrypoint = json.loads(FILE.last(target, "ENTRYPOINT"))
    pinned = lock_images.pins((DEPLOY / "locks" / f"{target}.txt").read_text())
    assert entrypoint[0] in pinned
    assert isinstance(json.loads(FILE.last(target, "CMD")), list), "a shell would take the signals"


@pytest.mark.parametrize("target", TARGETS)
def test_code_comes_after_packages_and_labels_after_code(target: str) -> None:
    """Or a change of code, or of a label, would make the large layer anew."""
    steps = FILE.stages[target].steps
    assert copies(target, of_context=False) == [
        [f"--from={target}-packages", VENV, VENV],
        ["--from=code", "/code", VENV],
    ]
    places = [number for number, (instruction, _) in enumerate(steps) if instruction == "COPY"]
    rest = [instruction for instruction, _ in steps[places[-1] + 1 :]]
    assert set(rest) == {"ARG", "LABEL"}
    assert "ARG" not in [instruction for instruction, _ in steps[: places[-1]]]


def test_labels_say_the_same_of_every_image() -> None:
    labels = [FILE.pairs(target, "LABEL") for target in TARGETS]
    assert len({frozenset(found) for found in labels}) == 1
    for target, found in zip(TARGETS, labels, strict=True):
        assert found["org.opencontainers.image.title"] == f"baton-{target}"
        assert found["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


def test_every_stage_starts_from_the_python_that_is_locked() -> None:
    outside = {stage.start for stage in FILE.stages.values()} - set(FILE.stages)
    assert outside == {f"docker.io/library/python:{lock_images.PYTHON}-slim"}


def test_pip_takes_what_is_locked_and_nothing_that_follows_from_it() -> None:
    """Without dependencies of dependencies: a lock names them all."""
    installs = [
        (stage.name, command)
        for stage in FILE.stages.values()
        for words in stage.of("RUN")
        for command in re.split(r"&&|\|\||;|\{|\}", words)
        if "pip install" in command
    ]
    assert installs
    for name, command in installs:
        assert "--no-deps" in command, (name, command)
        lock = f"/build/{name.removesuffix('-packages')}.txt" if name != "code" else "build.txt"
        ours = command.rstrip().endswith(" /build")
        torch = '"$torch' in command or '"torch==' in command
        assert lock in command or ours or torch, (name, command)


def test_locks_are_in_step_with_the_project() -> None:
    asked = lock_images.asked_of(PROJECT["project"], PROJECT["build-system"], TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    assert lock_images.faults(asked, json.loads(lock_images.ASKED.read_text()), locks) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("grpcio==", "grpcio-without=="), "grpcio is not pinned"),
        (("starlette==", "starlette==0."), "is not what starlette>=1.0 asks for"),
        (("rich==", "rich==99."), "rich is 99"),
    ],
)
def test_a_lock_that_is_out_of_step_is_named(change: tuple[str, str], told: str) -> None:
    asked = lock_images.asked_of(PROJECT["project"], PROJECT["build-system"], TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    locks["cpu"] = re.sub(f"^{change[0]}", change[1], locks["cpu"], flags=re.MULTILINE)
    assert told in "\n".join(lock_images.faults(asked, asked, locks))


def test_a_new_dependency_is_missed() -> None:
    asked = lock_images.asked_of(PROJECT["project"], PROJECT["build-system"], TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    was = {**asked, "cpu": asked["cpu"][1:]}
    assert lock_images.faults(asked, was, locks)[0].startswith("cpu: pyproject.toml asks")


@pytest.mark.parametrize("line", ["grpcio>=1", "grpcio", "grpcio==1.*", "-e .", "grpcio=== 1"])
def test_a_lock_holds_pins_only(line: str) -> None:
    with pytest.raises(ValueError, match="not a pin"):
        lock_images.pins(f"rich==15.0.0\n{line}\n")


def test_the_light_image_has_nothing_of_the_engine() -> None:
    light = lock_images.pins((DEPLOY / "locks" / "cpu.txt").read_text())
    heavy = {"torch", "numpy", "nixl", "nixl-cu12", "nixl-cu13", "transformers", "ray", "triton"}
    assert not heavy & set(light)
    for target in ("engine-cpu", "engine-gpu"):
        pinned = lock_images.pins((DEPLOY / "locks" / f"{target}.txt").read_text())
        assert {"torch", "nixl", "safetensors"} <= set(pinned)
        assert pinned["torch"] == TORCH


def test_all_commands_are_there() -> None:
    """The package is installed as pip installs it, scripts and all; these are what charts run."""
    processes = {"router", "tokenizer", "prefill", "decode", "detokenizer"}
    expected = {"baton", *(f"baton-{process}" for process in processes)}
    assert set(PROJECT["project"]["scripts"]) == expected
    assert "--prefix /code /build" in " ".join(FILE.stages["code"].of("RUN"))
    assert (ROOT / "services" / "baton" / "models" / "baton-tiny" / "model.safetensors").is_file()


def test_the_context_is_what_is_copied_and_nothing_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    admitted = {line[1:] for line in patterns if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for stage in FILE.stages
        for words in copies(stage, of_context=True)
        for source in words[:-1]
    }
    folders = {str(Path(source).parent) if "locks/" in source else source for source in copied}
    assert folders == admitted
    files = subprocess.run(
        ["git", "ls-files", *sorted(admitted)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kept = ("*.pem", "*.key", "*.crt", "*keys.json", "*.env", "*kubeconfig*", "*credentials*")
    assert files
    assert not [name for name in files if any(fnmatch(Path(name).name, one) for one in kept)]


def test_no_secret_is_asked_for_or_written_down() -> None:
    names = {words.partition("=")[0] for s in FILE.stages.values() for words in s.of("ARG")}
    names |= set().union(*(FILE.pairs(target, "ENV") for target in FILE.stages))
    assert not [n for n in names if re.search("TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY", n)]
    assert not re.search(r"://[^/\s]+@", (DEPLOY / "Dockerfile").read_text())


def test_trimming_leaves_what_is_loaded(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    kept = ["torch/__init__.py", "torch/bin/torch_shm_manager", "baton/tests.py", "sympy/core.py"]
    gone = ["torch/test/a.py", "torch/include/a.h", "nixl_ep/a.py", "sympy/core/tests/a.py",
            "pip/__init__.py", "torch/lib/libx.a"]  # fmt: skip
    for name in kept + gone:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip3").write_text("")
    subprocess.run(["sh", str(DEPLOY / "image" / "trim"), str(tmp_path)], check=True, timeout=30)
    assert [name for name in kept if not (packages / name).exists()] == []
    assert [name for name in gone if (packages / name).exists()] == []
    assert not list((tmp_path / "bin").iterdir())


def test_make_builds_each_with_the_builder_that_is_named() -> None:
    make = shutil.which("make")
    assert make is not None
    command = [make, "-s", "images", "IMAGE_BUILD=echo build", "IMAGE_REGISTRY=r.example/b/"]
    done = subprocess.run(
        [*command, "IMAGES=cpu engine-gpu"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    tag = PROJECT["project"]["version"]
    lines = done.stdout.splitlines()
    assert [line.split("-t ")[1] for line in lines] == [
        f"r.example/b/baton-cpu:{tag} .",
        f"r.example/b/baton-engine-gpu:{tag} .",
    ]
    assert all(line.startswith("build -f deploy/Dockerfile --target ") for line in lines)
