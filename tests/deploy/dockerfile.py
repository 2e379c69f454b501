"""Reads a Dockerfile into its stages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FROM = re.compile(r"(\S+)(?: AS (\S+))?")


@dataclass(frozen=True)
class Stage:
    """start: what it goes on from, a stage or an image. steps: (instruction, what follows it)."""

    name: str
    start: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [words for one, words in self.steps if one == instruction]


class Dockerfile:
    def __init__(self, path: Path) -> None:
        self.arguments: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        stage: Stage | None = None
        for instruction, words in _steps(path.read_text()):
            if instruction == "FROM":
                found = _FROM.fullmatch(words)
                assert found, words
                stage = Stage(found[2], self._filled(found[1]))
                self.stages[found[2]] = stage
            elif stage is None:
                assert instruction == "ARG", words
                name, _, value = words.partition("=")
                self.arguments[name] = value
            else:
                stage.steps.append((instruction, words))

    def chain(self, name: str) -> list[Stage]:
        """A stage and all that it goes on from, the first one first."""
        stage = self.stages[name]
        return [*(self.chain(stage.start) if stage.start in self.stages else ()), stage]

    def last(self, name: str, instruction: str) -> str:
        """What holds in the end of an instruction whose last one counts."""
        found = [words for stage in self.chain(name) for words in stage.of(instruction)]
        return found[-1] if found else ""

    def pairs(self, name: str, instruction: str) -> dict[str, str]:
        """Of ENV and LABEL, whose words are key=value."""
        found = {}
        for stage in self.chain(name):
            for words in stage.of(instruction):
                for key, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S+))', words):
                    found[key] = quoted or plain
        return found

    def _filled(self, words: str) -> str:
        for name, value in self.arguments.items():
            words = words.replace(f"${{{name}}}", value)
        return words


def _steps(text: str) -> Iterator[tuple[str, str]]:
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            instruction, _, words = line.strip().partition(" ")
            yield instruction, words.strip()
