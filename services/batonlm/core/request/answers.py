"""The grammar that the answers of one chat follow, and how their deltas are read.

The formats depend on the request, the operator's settings and the model's chat template.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from batonlm.core.errors import InvalidArgument
from batonlm.core.request.formats.calls import ToolFormat
from batonlm.core.request.formats.families import (
    DEFAULT,
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
)
from batonlm.core.request.formats.lark import CALL_SPACING, JSON_SPACING, Lark, schema_of
from batonlm.core.request.formats.reader import AnswerParts, Reader, Schema
from batonlm.core.request.model import AnswerFormat, ModelDescription
from batonlm.core.request.request import (
    ChatPrompt,
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    StopParams,
    Tool,
    ToolChoice,
    ToolUse,
)
from batonlm.core.request.validation import wrong


class AnswerDeltas:
    """Splits the deltas of one choice into content, reasoning and tool calls."""

    def __init__(
        self,
        parts: AnswerParts,
        *,
        calls_finish: bool,
        reasoning_end: int | None,
    ) -> None:
        """calls_finish: whether the finish reason of an answer that ends in calls is TOOL_CALLS.
        reasoning_end: the token that ends reasoning, or None when no single token does."""
        self._parts = parts
        self._calls_finish = calls_finish
        self._reasoning_end = reasoning_end
        self._num_tokens = 0
        self._ended_at: int | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far, markers included. Without a token that ends reasoning,
        all tokens count up to the delta whose text ended it."""
        if not self._parts.reasoned:
            return 0
        return self._num_tokens if self._ended_at is None else self._ended_at

    def of(self, delta: Delta) -> Delta:
        """Returns the delta with its text split. Text that may be part of a marker comes with a
        later delta."""
        parts = self._parts.feed(delta.text, last=delta.finish_reason is not None)
        self._count(delta)
        return replace(
            delta,
            text=parts.content,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
            finish_reason=self._reason(delta),
        )

    def _count(self, delta: Delta) -> None:
        if self._ended_at is None:
            if self._reasoning_end is None:
                if self._parts.reasoning_ended:
                    self._ended_at = self._num_tokens + len(delta.token_ids)
            elif self._reasoning_end in delta.token_ids:
                end = list(delta.token_ids).index(self._reasoning_end) + 1
                self._ended_at = self._num_tokens + end
        self._num_tokens += len(delta.token_ids)

    def _reason(self, delta: Delta) -> FinishReason | None:
        """Returns the finish reason. An answer that was cut by a stop string or within a call does
        not finish with TOOL_CALLS."""
        whole = delta.finish_reason is FinishReason.STOP and delta.stop_string is None
        called = self._parts.num_calls and not self._parts.in_call
        if whole and called and self._calls_finish:
            return FinishReason.TOOL_CALLS
        return delta.finish_reason


def grammar_for(
    tools: Sequence[Tool],
    choice: ToolChoice,
    form: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    *,
    left_open: bool,
    tokens: Mapping[str, int],
    schema: str = "",
) -> Grammar | None:
    """Returns the grammar that every answer has to follow, or None when there is no restriction.

    form: None: nothing is called. left_open: the prompt ends within reasoning. tokens: ids of the
    markers that are tokens. schema: of the content, as JSON: an answer is then this, or calls where
    they may be made. Raises InvalidArgument (`tools`) for a tool that the format cannot express.
    """
    lark = Lark(tokens, JSON_SPACING if schema else CALL_SPACING)
    if schema:
        body = _content(lark, schema, reasoning)
        if form is not None:
            body = f"{form.required(lark, tools, choice.parallel)} | {body}"
    elif form is None:
        return None
    elif choice.use is ToolUse.REQUIRED:
        called = [tool for tool in tools if choice.name in ("", tool.name)]
        body = form.required(lark, called, choice.parallel and not choice.name)
    elif choice.use is ToolUse.AUTO and not choice.parallel:
        body = form.at_most_one(lark, tools, reasoning.begin if reasoning is not None else "")
    else:
        return None
    return lark.grammar(f"{_reasoning(lark, reasoning, left_open)}{lark.rule(body)}")


def _content(lark: Lark, schema: str, reasoning: ReasoningFormat | None) -> str:
    """Matches content of a schema, with what stands before it. Raises InvalidArgument
    (`grammar`)."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        raise wrong("grammar", "must be a JSON schema") from None
    # Besides objects only `true` can be compiled, which allows everything.
    content = lark.schema(parsed if isinstance(parsed, dict) else {})
    head = reasoning.content if reasoning is not None else ""
    return f"{lark.text(head)} {content}" if head else content


def _reasoning(lark: Lark, reasoning: ReasoningFormat | None, left_open: bool) -> str:
    """Matches optional reasoning before the answer. Reasoning that has begun must end."""
    if reasoning is None:
        return ""
    after = lark.text(reasoning.after) if reasoning.after else "/\\n{0,2}/"
    thoughts = f"{lark.through(reasoning.end)} {after} "
    return thoughts if left_open else f"({lark.text(reasoning.begin)} {thoughts})? "


_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PREFIX = "call_"


class CallIds:
    """Makes the ids of tool calls: the same request gets the same ids wherever and whenever it
    runs. Prompts differ between the turns of a conversation, and so do the ids."""

    def __init__(self, prompt: Sequence[int], seed: int, length: int) -> None:
        """length: in characters; a short id has letters and digits only."""
        data = array("q", prompt).tobytes() + seed.to_bytes(8, "little")
        self._key = blake2b(data, digest_size=32).digest()
        self._prefix = _PREFIX if length > 2 * len(_PREFIX) else ""
        self._length = length

    def of(self, choice: int, index: int) -> str:
        """Returns the id of the call at an index of a choice."""
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
"""The values that an operator may set."""


MAX_TOOLS_GRAMMAR = 1 << 18
"""In characters."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The formats that the answers of one chat use. At least one of `tools` and `reasoning` is
    set."""

    chat: ChatPrompt
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    left_open: bool
    """Whether the prompt ends within reasoning."""
    tokens: dict[str, int]
    """The token ids of the markers that are tokens."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must appear in the answer's text even where they are special tokens."""
        tools = self.tools.markers if self.tools else ()
        reasoning = self.reasoning.markers if self.reasoning else ()
        return (*tools, *reasoning)

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """Returns the grammar of the answers: what the tool choice requires, and what the request
        asks for. Where that is a schema, reasoning may come before it, and calls may take its
        place; any other is of the whole answer. Raises InvalidArgument (`tools` or `grammar`)."""
        if asked is not None and asked.kind is not GrammarKind.JSON_SCHEMA:
            return asked
        grammar = grammar_for(
            self.chat.tools,
            self.chat.tool_choice,
            self.tools,
            self.reasoning,
            left_open=self.left_open,
            tokens=self.tokens,
            schema=asked.text if asked is not None else "",
        )
        if grammar is not None and len(grammar.text) > MAX_TOOLS_GRAMMAR:
            raise InvalidArgument("tools are too much to be followed", field="tools")
        return grammar

    def ending(self, stop: StopParams, model: ModelDescription) -> StopParams:
        """Returns where an answer ends: also at the markers that end the model's turn, where its
        files do not say so."""
        if self.tools is None or stop.ignore_eos:
            return stop
        ids = [self.tokens[marker] for marker in self.tools.stops if marker in self.tokens]
        known = {*model.eos_token_ids, *stop.stop_token_ids}
        more = tuple(each for each in ids if each not in known)
        return replace(stop, stop_token_ids=(*stop.stop_token_ids, *more)) if more else stop

    def deltas(self, n: int, prompt: Sequence[int], seed: int) -> tuple[AnswerDeltas, ...]:
        """Returns one reader of deltas for each choice."""
        readers: list[Reader] = []
        tools: dict[str, Schema] = {}
        call_id = _no_call
        end = None
        named = self.chat.tool_choice.name
        if self.reasoning is not None:
            readers.append(self.reasoning.reader(self.left_open, self.tools))
            end = self.tokens.get(self.reasoning.end)
        if self.tools is not None:
            if self.reasoning is None or self.reasoning.whole is None:
                readers.append(self.tools.read)
            tools = {t.name: schema_of(t) for t in self.chat.tools if named in ("", t.name)}
            call_id = CallIds(prompt, seed, self.tools.id_length).of
        return tuple(
            AnswerDeltas(
                AnswerParts(tuple(readers), tools, partial(call_id, choice)),
                calls_finish=not named,
                reasoning_end=end,
            )
            for choice in range(n)
        )


def _no_call(choice: int, index: int) -> str:
    raise AssertionError("nothing here reads calls")


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The operator's settings for tool calls and reasoning."""

    tools: str = AUTO
    """One of TOOL_CHOICES."""
    reasoning: str = AUTO
    """One of REASONING_CHOICES."""

    def reasoning_of(self, model: AnswerFormat) -> ReasoningFormat | None:
        """Returns how a model marks its reasoning; None where it has none."""
        return REASONING_FORMATS.get(model.reasoning if self.reasoning == AUTO else self.reasoning)

    def of(self, request: Request, model: AnswerFormat, *, left_open: bool) -> Answers | None:
        """Returns the formats of a request's answers, or None when they are plain text. left_open:
        the prompt ends within reasoning.

        Raises InvalidArgument (`tool_choice`) when the request asks for calls that cannot be read.
        """
        chat = request.prompt
        if not isinstance(chat, ChatPrompt):
            return None
        tools = (model.tools or DEFAULT) if self.tools == AUTO else self.tools
        if tools == NONE and chat.tool_choice.use is ToolUse.REQUIRED:
            raise InvalidArgument(
                "tool_choice cannot require a call: this model's calls are not read here",
                field="tool_choice",
            )
        if not chat.tools or chat.tool_choice.use is ToolUse.NONE:
            tools = NONE
        form, reasoning = TOOL_FORMATS.get(tools), self.reasoning_of(model)
        if form is TOOL_FORMATS[HARMONY]:
            reasoning = REASONING_FORMATS[HARMONY]
        answers = Answers(
            chat,
            form,
            reasoning,
            left_open,
            dict(model.markers),
        )
        return answers if answers.tools or answers.reasoning else None
