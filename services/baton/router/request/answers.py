"""How the answers of one request are read and what they are bound to.

Chosen from what it asks for, what the operator set and what the model's chat template tells.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from baton.core.errors import InvalidArgument
from baton.core.request.answer_deltas import AnswerDeltas
from baton.core.request.answer_parts import AnswerParts, Reader
from baton.core.request.grammar import Grammar
from baton.core.request.model import AnswerFormat
from baton.core.request.reasoning import REASONING_FORMATS, ReasoningFormat
from baton.core.request.request import ChatPrompt, Request, ToolUse
from baton.core.request.tool_formats.forms import DEFAULT, TOOL_FORMATS, ToolFormat
from baton.core.request.tool_grammar import grammar_for

# Ids of calls of tools: the same wherever and whenever the same request is run.

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PREFIX = "call_"


class CallIds:
    """Prompts differ from turn to turn of a conversation, and so do the ids. length: in characters;
    a short id has letters and digits only."""

    def __init__(self, prompt: Sequence[int], seed: int, length: int) -> None:
        said = array("q", prompt).tobytes() + seed.to_bytes(8, "little")
        self._key = blake2b(said, digest_size=32).digest()
        self._prefix = _PREFIX if length > 2 * len(_PREFIX) else ""
        self._length = length

    def of(self, choice: int, index: int) -> str:
        """The id of a choice's call."""
        name = f"{choice} {index}".encode()
        digest = blake2b(name, digest_size=32, key=self._key).digest()
        number = int.from_bytes(digest, "little")
        letters = []
        for _ in range(self._length - len(self._prefix)):
            number, digit = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[digit])
        return self._prefix + "".join(letters)


AUTO, NONE = "auto", "none"
TOOL_CHOICES = (AUTO, *TOOL_FORMATS, NONE)
REASONING_CHOICES = (AUTO, *REASONING_FORMATS, NONE)
"""What an operator may set."""


MAX_TOOLS_GRAMMAR = 1 << 18
"""Characters."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one chat. At least one of tools and reasoning is there."""

    chat: ChatPrompt
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    left_open: bool
    tokens: dict[str, int]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that have to be in the answer's text, be they special tokens or not."""
        tools = self.tools.markers if self.tools else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*tools, *reasoning)

    def grammar(self) -> Grammar | None:
        """What the choice of tools asks for. Raises InvalidArgument (`tools`)."""
        if self.tools is None:
            return None
        grammar = grammar_for(
            self.chat.tools,
            self.chat.tool_choice,
            self.tools,
            self.reasoning,
            left_open=self.left_open,
            tokens=self.tokens,
        )
        if grammar is not None and len(grammar.text) > MAX_TOOLS_GRAMMAR:
            raise InvalidArgument("tools are too much to be followed", field="tools")
        return grammar

    def deltas(self, n: int, prompt: Sequence[int], seed: int) -> tuple[AnswerDeltas, ...]:
        """One a choice, to put its deltas through."""
        readers: list[Reader] = []
        names: frozenset[str] = frozenset()
        call_id = _no_call
        end = None
        named = self.chat.tool_choice.name
        if self.reasoning is not None:
            readers.append(self.reasoning.read_open if self.left_open else self.reasoning.read)
            end = self.tokens.get(self.reasoning.end)
        if self.tools is not None:
            readers.append(self.tools.read)
            names = frozenset(tool.name for tool in self.chat.tools if named in ("", tool.name))
            call_id = CallIds(prompt, seed, self.tools.id_length).of
        return tuple(
            AnswerDeltas(
                AnswerParts(tuple(readers), names, partial(call_id, choice)),
                calls_finish=not named,
                reasoning_end=end,
            )
            for choice in range(n)
        )


def _no_call(choice: int, index: int) -> str:
    raise AssertionError("nothing here reads calls")


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What the operator set: one of TOOL_CHOICES and one of REASONING_CHOICES."""

    tools: str = AUTO
    reasoning: str = AUTO

    def of(self, request: Request, model: AnswerFormat, *, left_open: bool) -> Answers | None:
        """None when its answers are plain text. left_open: its prompt ends within reasoning.

        Raises InvalidArgument (`tool_choice`) when calls are asked for and cannot be read.
        """
        chat = request.prompt
        if not isinstance(chat, ChatPrompt):
            return None
        reasoning = model.reasoning if self.reasoning == AUTO else self.reasoning
        tools = (model.tools or DEFAULT) if self.tools == AUTO else self.tools
        if tools == NONE and chat.tool_choice.use is ToolUse.REQUIRED:
            raise InvalidArgument(
                "tool_choice cannot require a call: this model's calls are not read here",
                field="tool_choice",
            )
        if not chat.tools or chat.tool_choice.use is ToolUse.NONE:
            tools = NONE
        answers = Answers(
            chat,
            TOOL_FORMATS.get(tools),
            REASONING_FORMATS.get(reasoning),
            left_open,
            dict(model.markers),
        )
        return answers if answers.tools or answers.reasoning else None
