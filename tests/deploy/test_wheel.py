"""The wheel, built and installed into a new environment, where no checkout is near."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

from batonlm.core.errors import install
from tests.deploy.test_images import PROJECT

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = next(path for path in map(Path, sys.path) if (path / "msgspec").is_dir())


def run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="builds the wheel; among the extra `dev`")
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the commands of an environment that has the wheel, and its dependencies from
    this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    target = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    run([*map(str, pip), "--no-deps", "--no-index", "-q", wheel], folder)
    (target / "dependencies.pth").write_text(f"{PACKAGES}\n")
    yield folder / "bin"


def test_the_wheel_has_the_protos_and_the_bundled_files(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    protos = {f"batonlm/protos/{file.relative_to(ROOT / 'protos')}" for file in PROTOS}
    assert protos and protos <= names
    bundled = {f"baton_loadtest/bundled/{name}" for name in ("chat.toml", "trace.jsonl")}
    assert bundled | {"batonlm/models/baton-tiny/model.safetensors"} <= names
    page = {f"batonlm/router/api/http/page/{file.relative_to(PAGE)}" for file in PAGE.rglob("*.*")}
    assert "batonlm/router/api/http/page/vendor/marked.js" in page and page <= names
    assert any(name.endswith("/licenses/NOTICE") for name in names)


PROTOS = list((ROOT / "protos").rglob("*.proto"))
PAGE = ROOT / "services" / "batonlm" / "router" / "api" / "http" / "page"


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    for field in ("Author", "License-Expression", "Classifier", "Keywords", "Requires-Python"):
        assert re.search(rf"^{field}: .+", text, re.MULTILINE), field


@pytest.mark.parametrize(
    "command",
    (
        ["simulate", "--seconds", "10"],
        ["plan", "split", "--workers=2", "--first-token-ms=2000", "--between-tokens-ms=500"],
    ),
    ids=("simulate", "plan split"),
)  # fmt: skip
def test_an_installed_command_needs_no_file_of_the_users(
    command: list[str | Path], scripts: Path, tmp_path: Path
) -> None:
    assert run([scripts / "baton", *command], tmp_path)
    where = run([scripts / "python", "-c", "import batonlm; print(batonlm.__file__)"], tmp_path)
    assert Path(where).is_relative_to(scripts.parent)


def test_every_extra_that_is_advised_exists() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    advised = {
        found
        for folder in ("services", "loadtest")
        for file in (ROOT / folder).rglob("*.py")
        for found in re.findall(r"\binstall\([\"'](\w+)[\"']\)", file.read_text())
    }
    assert advised and advised <= extras
    written = [
        str(file)
        for folder in ("services", "loadtest")
        for file in (ROOT / folder).rglob("*.py")
        if "pip install 'batonlm" in file.read_text() and file.name != "errors.py"
    ]
    assert not written, "batonlm.core.errors.install words these"
    assert install("tls") == f"pip install '{metadata('batonlm')['Name']}[tls]'"
