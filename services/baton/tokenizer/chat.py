"""Renders a conversation with the model's chat template. Knows nothing of token ids.

Gives the text that `transformers`' `apply_chat_template(tokenize=False)` gives for the same model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jinja2 import TemplateSyntaxError

from baton.core.errors import InvalidArgument
from baton.core.request import ChatPrompt
from baton.tokenizer.sandbox import OverBudget, Sandbox

log = logging.getLogger(__name__)

CONTINUE_MARK = "BATON_CONTINUES_HERE "
"""Stands behind the final message while it is rendered. Its space tells whether it is trimmed."""


class ChatTemplate:
    """special_tokens: text by name. Making one raises InvalidArgument (`model`) if it is broken."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, cpu_s: float, max_characters: int
    ) -> None:
        self._uses_content = "content" in source
        self._special_tokens = dict(special_tokens)
        self._cpu_s = cpu_s
        self._max_characters = max_characters
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidArgument(
                f"its chat template is broken at line {error.lineno}", field="model"
            ) from error

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
                "the model's chat template does not show the final message as it is",
                field="continue_final_message",
            )
        before, _, after = text.rpartition(mark)
        # A template that trimmed the mark's space trims messages: this one's own end too.
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, chat: ChatPrompt, final_content: str) -> str:
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        messages[-1]["content"] = final_content
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            return self._sandbox.render(
                self._template,
                variables,
                cpu_s=self._cpu_s,
                max_characters=self._max_characters,
            )
        except OverBudget:
            raise InvalidArgument(
                "are too much for the model's chat template: too many, or too long together",
                field="messages",
            ) from None
        except Exception as error:  # a template can raise anything, and its text is not ours
            log.debug("the chat template failed", exc_info=error)
            raise InvalidArgument(
                "are not accepted by the model's chat template; check their roles and their order",
                field="messages",
            ) from None
