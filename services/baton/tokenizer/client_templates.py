"""Renders chat templates that clients bring, each in a process that may be killed. Knows no chats.

A client's program is a stranger's: besides the sandbox it gets a process of its own with little
memory, which is killed when its time is up. One that rendered in time is used again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.core.errors import InvalidArgument, Unavailable
from baton.tokenizer.child import Child
from baton.tokenizer.sandbox import OverBudget

START_S = 30.0
SLACK_S = 1.0
"""Beyond the processor time it may use: the machine has other work, too."""


class TemplateFailed(Exception):
    """The template raised something, which is not told."""


class ClientTemplates:
    """May be used by several threads; each has a process to itself meanwhile.

    cpu_s, max_characters: what one render may use.
    """

    def __init__(self, *, cpu_s: float, max_characters: int) -> None:
        self._cpu_s = cpu_s
        self._max_characters = max_characters
        self._idle: list[Child] = []

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises InvalidArgument (`template`) if it is no template, OverBudget, TemplateFailed, or
        Unavailable when no process can be had.
        """
        job = {
            "source": source,
            "variables": variables,
            "cpu_s": self._cpu_s,
            "max_characters": self._max_characters,
        }
        line = json.dumps(job).encode() + b"\n"
        child = self._free()
        answer = child.ask(line, self._cpu_s + SLACK_S)
        if answer is None:
            raise OverBudget
        self._idle.append(child)
        match json.loads(answer):
            case {"text": str(text)}:
                return text
            case {"line": line}:
                raise InvalidArgument(f"is broken at line {line}", field="template")
            case {"over_budget": True}:
                raise OverBudget
        raise TemplateFailed

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def _free(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.code is None:
                return child
            child.end()
        child = Child("baton.tokenizer.client_template_process")
        if child.ready(START_S):
            return child
        raise Unavailable("no process for a client's chat template can be started")
