"""Ends the processes that chats were rendered in, so that each module finds none but its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batonlm.tokenizer import renderers
from tests.services.tokenizer.model_folders import RENDERERS


@pytest.fixture(scope="module", autouse=True)
def rendered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patient:
        # Templates are bounded by CPU time here: a machine that stands still is none's fault.
        patient.setattr(renderers, "SLACK_S", 60.0)
        yield
        RENDERERS.close()
