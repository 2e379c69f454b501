"""Renders a conversation with a chat template. Knows nothing of token ids.

Gives the text that `transformers`' `apply_chat_template(tokenize=False)` gives for the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jinja2 import TemplateSyntaxError

from baton.core.errors import BatonError, InvalidArgument
from baton.core.request import ChatPrompt
from baton.core.template_kwargs import parse_template_kwargs
from baton.tokenizer import chat_values
from baton.tokenizer.sandbox import OverBudget, Sandbox

CONTINUE_MARK = "BATON_CONTINUES_HERE "
"""Stands behind the final message while it is rendered. Its space tells whether it is trimmed."""


Run = Callable[[Mapping[str, Any]], str]
"""Variables to text. Raises OverBudget, a BatonError, or whatever the template's code raises."""


def model_template(
    source: str, special_tokens: Mapping[str, str], *, cpu_s: float, max_characters: int
) -> ChatTemplate:
    """The model's own. Raises InvalidArgument (`model`) if it is broken."""
    sandbox = Sandbox()
    try:
        template = sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise InvalidArgument(
            f"its chat template is broken at line {error.lineno}", field="model"
        ) from error
    run = partial(sandbox.render, template, cpu_s=cpu_s, max_characters=max_characters)
    return ChatTemplate(source, special_tokens, run)


class ChatTemplate:
    """special_tokens: text by name. run: what renders the source."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], run: Run) -> None:
        self._uses_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._run = run

    def render(self, chat: ChatPrompt) -> str:
        """The conversation as one text. Raises InvalidArgument naming the field at fault."""
        if not chat.messages:
            raise InvalidArgument("must hold at least one message", field="messages")
        if not chat.continue_final_message:
            return self._render(chat, chat.messages[-1].content)
        if chat.add_generation_prompt:
            raise InvalidArgument(
                "cannot be combined with add_generation_prompt", field="continue_final_message"
            )
        return self._open_end(chat)

    def _open_end(self, chat: ChatPrompt) -> str:
        """Everything up to where the final message ends."""
        final = chat.messages[-1].content
        text = self._render(chat, final + CONTINUE_MARK) if self._uses_content else ""
        mark = CONTINUE_MARK.rstrip()
        if mark not in text or final.strip() not in text:
            raise InvalidArgument(
                "the chat template does not show the final message as it is",
                field="continue_final_message",
            )
        before, _, after = text.rpartition(mark)
        # A template that trimmed the mark's space trims messages: this one's own end too.
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, chat: ChatPrompt, final_content: str) -> str:
        messages = chat_values.messages(chat)
        messages[-1]["content"] = final_content
        variables = {
            **self._special_tokens,
            **parse_template_kwargs(chat.template_kwargs),
            "messages": messages,
            "tools": chat_values.tools(chat),
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._run(variables)
        except BatonError:
            raise
        except OverBudget:
            raise InvalidArgument(
                "are too much for the chat template: too many, or too long together",
                field="messages",
            ) from None
        except Exception as error:  # a template can raise anything, and its text is not ours
            raise InvalidArgument(
                "are not accepted by the chat template; check their roles and their order",
                field="messages",
            ) from error
