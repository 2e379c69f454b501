"""Tiny models, saved once a session, and one torch thread for all tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from batonlm.core.scheduler.plan import ModelRunner
from tests.engine.contract import MakeRunner, open_runner
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an architecture's tiny model."""
    root = tmp_path_factory.mktemp("models")

    def folder(arch: str) -> Path:
        path = root / arch
        return path if path.exists() else save_tiny_model(arch, path)

    return folder


@pytest.fixture(params=["fake", "late", "torch"])
def make(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Iterator[MakeRunner]:
    """Makes runners of one kind and model, and closes them."""
    with ExitStack() as ends:

        def make_one() -> ModelRunner:
            runner = open_runner(request.param, saved("llama"))
            ends.callback(runner.close)
            return runner

        yield make_one
