"""Router, tokenizer and detokenizer stay small and load neither torch nor NIXL."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.relay import Relay, options

MIB = 1 << 20
LIMITS = {"router": 120, "detokenizer": 120, "tokenizer": 250}


@pytest.mark.parametrize("role", LIMITS)
def test_memory_and_libraries(relay: Relay, role: str) -> None:
    relay.generate("Hello", options(max_tokens=8))
    pid = relay.processes(role)[0]["pid"]
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in mapped
    assert "nixl" not in mapped
    assert psutil.Process(pid).memory_info().rss < LIMITS[role] * MIB
