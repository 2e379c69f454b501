"""Ends the processes that chats were rendered in, so that each module finds none but its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.tokenizer.model_folders import RENDERERS


@pytest.fixture(scope="module", autouse=True)
def rendered() -> Iterator[None]:
    yield
    RENDERERS.close()
