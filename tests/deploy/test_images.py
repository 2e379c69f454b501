"""What can be said of the images without a builder: who runs in them, and what goes into them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

import lock_base
import lock_images
from lock_images import Pin
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


def test_every_stage_starts_from_one_base_image_by_its_digest() -> None:
    outside = {stage.start for stage in FILE.stages.values()} - set(FILE.stages) - {"scratch"}
    assert len(outside) == 1
    tag, digest = outside.pop().split("@")
    assert tag == f"docker.io/library/python:{lock_images.PYTHON}-slim-{lock_base.SUITE}"
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)


def commands(tool: str) -> list[tuple[str, str]]:
    """What the Dockerfile runs of a tool, with the stage; `$INSTALL` written out."""
    install = FILE.pairs("empty", "ENV").get("INSTALL", "$INSTALL")
    return [
        (stage.name, command.strip())
        for stage in FILE.stages.values()
        for words in stage.of("RUN")
        for command in re.split(r"&&|\|\||;|[{}] ", words.replace("$INSTALL", install))
        if tool in command
    ]


def test_pip_takes_what_is_locked_with_its_hash_and_nothing_that_follows_from_it() -> None:
    """Without dependencies of dependencies: a lock names them all."""
    installs = commands("pip install")
    assert {name for name, _ in installs} == {"code", *(f"{target}-packages" for target in TARGETS)}
    for name, command in installs:
        assert "--no-deps" in command, (name, command)
        if "file://" in command:
            assert "--no-index" in command and "#sha256=" in command, command
            continue
        assert "--require-hashes --only-binary=:all:" in command, (name, command)
        lock = "build" if name == "code" else name.removesuffix("-packages")
        torch = {"/build/torch.txt"} if lock.startswith("engine-") else set()
        assert set(re.findall(r"-r (\S+)", command)) <= {f"/build/{lock}.txt", *torch}, command
        assert not re.search(r"\s[A-Za-z][\w-]*(==|>=)", command), f"not of a lock: {command}"


def test_batons_own_wheel_is_built_by_what_is_locked() -> None:
    ((stage, command),) = commands("pip wheel")
    assert stage == "code"
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(command.split())


def test_nothing_is_installed_at_a_version_that_floats() -> None:
    for tool in ("apt", "curl", "wget", "npm", "git clone", "ensurepip", "easy_install"):
        assert commands(tool) == [], tool
    assert not [words for stage in FILE.stages.values() for words in stage.of("ADD")]


def test_the_compiler_is_complete_and_has_hashes() -> None:
    """Of every package that it needs, those of the base image too."""
    installs = commands("debian.py")
    # Images other than the GPU's take files of `code`, and no layer.
    assert [stage for stage, _ in installs] == ["code", "compiler"]
    assert [one.name for one in FILE.chain("engine-gpu")] == ["base", "compiler", "engine-gpu"]
    assert all(f"/build/{lock_base.COMPILER.name}" in command for _, command in installs)
    lines = lock_base.COMPILER.read_text().splitlines()
    places = [line for line in lines if line.startswith("from ")]
    assert any(re.search(r"snapshot.*/\d{8}T\d{6}Z/", place) for place in places), (
        "no lasting place"
    )
    names = set()
    for line in lines[len(places) :]:
        found = re.fullmatch(
            r"[0-9a-f]{64} ([a-z-]+) pool/\S+/([^_/]+)_[^_/]+_(amd64|all).deb", line
        )
        assert found, line
        assert found[1] in lock_base.ARCHIVES
        names.add(found[2])
    assert {*lock_base.ASKED, "gcc-12", "cpp-12", "binutils", "libc6", "linux-libc-dev"} <= names
    assert len(names) == len(lines) - len(places)


def test_locks_are_in_step_with_the_project() -> None:
    asked = lock_images.asked_of(PROJECT, TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    assert lock_images.faults(asked, json.loads(lock_images.ASKED.read_text()), locks) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("grpcio==", "grpcio-without=="), "grpcio is not pinned"),
        (("starlette==", "starlette==0."), "is not what starlette>=1.0 asks for"),
        (("rich==", "rich==99."), "rich is 99"),
        (("rich==(.*):[0-9a-f]{8}", r"rich==\1:00000000"), "is another file in cpu than in"),
    ],
)
def test_a_lock_that_is_out_of_step_is_named(change: tuple[str, str], told: str) -> None:
    asked = lock_images.asked_of(PROJECT, TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    locks["cpu"] = re.sub(f"^{change[0]}", change[1], locks["cpu"], flags=re.MULTILINE)
    assert told in "\n".join(lock_images.faults(asked, asked, locks))


def test_a_new_dependency_is_missed() -> None:
    asked = lock_images.asked_of(PROJECT, TORCH)
    locks = {name: (DEPLOY / "locks" / f"{name}.txt").read_text() for name in asked}
    was = {**asked, "cpu": asked["cpu"][1:]}
    assert lock_images.faults(asked, was, locks)[0].startswith("cpu: pyproject.toml asks")


HASH = f"--hash=sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    "line",
    [
        "grpcio==1.85.1",
        f"grpcio==1.85.1 {HASH[:-1]}",
        f"grpcio==1.85.1 {HASH.replace('sha256', 'md5')}",
        f"grpcio>=1 {HASH}",
        f"grpcio {HASH}",
        f"grpcio==1.* {HASH}",
        f"grpcio=== 1 {HASH}",
        f"-e . {HASH}",
        "--extra-index-url https://wheels.example",
    ],
)
def test_a_lock_holds_pins_with_hashes_only(line: str) -> None:
    with pytest.raises(ValueError, match="not a pin"):
        lock_images.pins(f"rich==15.0.0 {HASH}\n{line}\n")


@pytest.mark.parametrize("name", lock_images.LOCKED)
def test_every_line_of_every_lock_has_its_hash(name: str) -> None:
    text = (DEPLOY / "locks" / f"{name}.txt").read_text()
    pinned = lock_images.pins(text)
    assert "".join(f"{pin}\n" for pin in pinned.values()) == text
    assert all(pin.hashes for pin in pinned.values())
    assert list(pinned) == sorted(pinned, key=lambda one: pinned[one].name.lower())


def test_resolving_keeps_the_present_versions_but_those_that_no_longer_do() -> None:
    present = lock_images.pins(f"rich==15.0.0 {HASH}\ntorch==2.13.0+cpu {HASH}\n")
    asked: list[list[str]] = []

    def resolve(lines: Sequence[str], kept: Sequence[str], _: Sequence[str]) -> list[Pin]:
        asked.append(list(kept))
        if len(asked) == 1:
            raise subprocess.CalledProcessError(1, "pip")
        return [Pin("rich", "16.0", ("0b" * 32,))]

    text = lock_images.lock("cpu", ["rich>=15"], TORCH, present, resolve)
    assert text == f"rich==16.0 --hash=sha256:{'0b' * 32}\n"
    assert asked == [["rich==15.0.0", "torch==2.13.0+cpu"], []], "where that fails, without them"
    asked.clear()
    lock_images.lock("cpu", ["rich>=16"], TORCH, present, resolve)
    assert asked[0] == ["torch==2.13.0+cpu"]


def test_an_image_for_older_drivers_takes_torchs_build_for_them_and_its_half_of_nixl() -> None:
    asked: list[tuple[list[str], list[str]]] = []

    def resolve(lines: Sequence[str], _: Sequence[str], options: Sequence[str]) -> list[Pin]:
        asked.append((list(lines), list(options)))
        if not options:
            raise subprocess.CalledProcessError(1, "pip")
        names = ("nixl", "nixl-cu12", "nixl-cu13", "torch")
        return [Pin(name, "1.0", ("0b" * 32,)) for name in names]

    (name,) = lock_images.BY_REQUEST
    text = lock_images.lock(name, ["nixl>=1", f"torch=={TORCH}"], TORCH, {}, resolve)
    assert set(lock_images.pins(text)) == {"nixl", "nixl-cu12", "torch"}
    lines, options = asked[-1]
    assert lines == ["nixl>=1", f"torch=={TORCH}+cu126"]
    assert options[-1].endswith("/whl/cu126")
    # The Dockerfile takes it in the place of the kept one.
    stage = FILE.stages["engine-gpu-packages"]
    assert stage.of("COPY") == ["deploy/locks/${GPU_LOCK}.txt /build/engine-gpu.txt"]
    assert FILE.arguments["GPU_LOCK"] in lock_images.IMAGES


def test_the_light_image_has_nothing_of_the_engine() -> None:
    light = lock_images.pins((DEPLOY / "locks" / "cpu.txt").read_text())
    heavy = {"torch", "numpy", "nixl", "nixl-cu12", "nixl-cu13", "transformers", "triton"}
    assert not heavy & set(light)
    for target in ("engine-cpu", "engine-gpu"):
        pinned = lock_images.pins((DEPLOY / "locks" / f"{target}.txt").read_text())
        assert {"torch", "nixl", "safetensors"} <= set(pinned)
        assert pinned["torch"].public_version == TORCH


def test_all_commands_are_there() -> None:
    """The package is installed as pip installs it, scripts and all; these are what charts run."""
    processes = {"router", "tokenizer", "prefill", "decode", "detokenizer", "encode", "ranks"}
    processes |= {"planner"}
    expected = {"baton", *(f"baton-{process}" for process in processes)}
    assert set(PROJECT["project"]["scripts"]) == expected
    assert "--prefix /code" in " ".join(FILE.stages["code"].of("RUN"))
    assert (ROOT / "services" / "batonlm" / "models" / "baton-tiny" / "model.safetensors").is_file()


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
    parts = ("deploy/locks/", "deploy/image/")
    folders = {str(Path(one).parent) if one.startswith(parts) else one for one in copied}
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
    subprocess.run(["sh", str(DEPLOY / "image" / "trim"), str(tmp_path)], check=True, timeout=120)
    assert [name for name in kept if not (packages / name).exists()] == []
    assert [name for name in gone if (packages / name).exists()] == []
    assert not list((tmp_path / "bin").iterdir())


def test_make_builds_each_with_the_builder_that_is_named() -> None:
    make = shutil.which("make")
    assert make is not None
    command = [make, "-s", "images", "IMAGE_BUILD=echo build", "IMAGE_REGISTRY=r.example/b/"]
    done = subprocess.run(
        [*command, "IMAGES=cpu engine-gpu"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    tag = PROJECT["project"]["version"]
    lines = done.stdout.splitlines()
    assert [line.split("-t ")[1] for line in lines] == [
        f"r.example/b/baton-cpu:{tag} .",
        f"r.example/b/baton-engine-gpu:{tag} .",
    ]
    assert all(line.startswith("build -f deploy/Dockerfile --target ") for line in lines)
    assert not [line for line in lines if "PYTHON=" in line]
    done = subprocess.run(
        [*command, "IMAGES=cpu", "IMAGE_BASE=r.example/python:3.11"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert " --build-arg PYTHON=r.example/python:3.11 " in done.stdout
