"""One Baton with API keys, and the clients of other people, installed as their users would.

They are installed into throw-away folders, so that nothing here depends on them; where no package
registry can be reached, their tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.relay import Relay

INSTALL_S = 600
RUN_S = 150
PYTHON_CLIENTS = ("openai", "anthropic", "ollama", "litellm", "llm", "grpcio", "grpcio-tools")
NODE_CLIENTS = (
    "openai", "@anthropic-ai/sdk", "ollama", "@bufbuild/buf", "@bufbuild/protobuf",
    "@bufbuild/protoc-gen-es", "@connectrpc/connect", "@connectrpc/connect-web",
)  # fmt: skip
PYTHON_AGENTS = (
    "langchain", "langchain-openai", "openai-agents", "pydantic-ai-slim[openai]", "instructor",
)  # fmt: skip
NODE_AGENTS = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")
TENANTS = ("openai", "node", "anthropic", "litellm", "llm", "grpcio")
TIGHT = "12"
"""Requests a minute of each tenant: two at once, then one every five seconds."""


@dataclass(frozen=True)
class Served:
    """A running Baton. key: without limits; tight_keys: by tenant, each with its own limit."""

    relay: Relay
    key: str
    tight_keys: dict[str, str]

    def refusals(self) -> float:
        return self.relay.metric(self.relay.processes("router")[0], "baton_refusals_total")

    def run(self, *command: str | Path, tight: str = "", **more: str) -> str:
        """What a client prints. tight: the tenant whose key is in TIGHT_KEY."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        environment = {
            **kept,
            "OPENAI_BASE_URL": f"{self.relay.http}/v1",
            "OPENAI_API_KEY": self.key,
            "TIGHT_KEY": self.tight_keys.get(tight, ""),
            "HTTP": self.relay.http,
            "GRPC": self.relay.description["grpc"],
            "MODEL": "baton-tiny",
            "NO_PROXY": "127.0.0.1",
            **more,
        }
        done = subprocess.run(
            [str(word) for word in command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys.json"
    limits = ("--requests-per-minute", TIGHT)
    key, *tight = [
        _new_key(keys, name, *more)
        for name, more in (("free", ()), *((name, limits) for name in TENANTS))
    ]
    relay = Relay(folder, "--keys", str(keys))
    yield Served(relay, key, dict(zip(TENANTS, tight, strict=True)))
    relay.close()


@pytest.fixture(scope="session")
def python_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with nothing but other people's clients."""
    return _python(tmp_path_factory, PYTHON_CLIENTS)


@pytest.fixture(scope="session")
def agent_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with libraries for agents, whose requirements are others."""
    return _python(tmp_path_factory, PYTHON_AGENTS)


def _python(folders: pytest.TempPathFactory, packages: Sequence[str]) -> Path:
    folder = folders.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    install(folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return folder / "bin"


@pytest.fixture(scope="session")
def node_clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with node_modules."""
    return _node(tmp_path_factory, NODE_CLIENTS)


@pytest.fixture(scope="session")
def node_agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the AI SDK."""
    return _node(tmp_path_factory, NODE_AGENTS)


def _node(folders: pytest.TempPathFactory, packages: Sequence[str]) -> Path:
    if not shutil.which("npm") or not shutil.which("node"):
        pytest.skip("needs node and npm")
    folder = folders.mktemp("node")
    npm = ("npm", "install", "--prefix", folder, "--no-audit", "--no-fund", "--loglevel=error")
    install(*npm, *packages)
    return folder


def beside_ours(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the Python of a new environment that has these packages, without what they require,
    and all that this environment has."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    own = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    # Also the folders that this environment itself takes from elsewhere.
    shared = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
    (own / "shared.pth").write_text("\n".join(dict.fromkeys(shared)))
    pip = folder / "bin/pip"
    install(pip, "install", "-q", "--disable-pip-version-check", "--no-deps", *packages)
    return folder / "bin/python"


def install(*command: str | Path) -> None:
    """Skips the test where that cannot be done."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        what = Path(command[0]).name
        pytest.skip(f"{what} cannot install the clients: {done.stderr.strip()[-300:]}")


def _new_key(file: Path, tenant: str, *limits: str) -> str:
    command = (sys.executable, "-m", "batonlm.cli.main", "keys", "new", "--tenant", tenant)
    made = subprocess.run(
        [*command, *limits, str(file)], capture_output=True, text=True, check=True, timeout=60
    )
    return made.stdout.strip()
