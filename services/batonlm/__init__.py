"""Baton: a disaggregated LLM server with every stage in its own pool.

`batonlm.LLM` runs a model in this process, without servers. It is imported when it is first used,
because it needs torch and the rest needs none.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return import_module("batonlm.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
