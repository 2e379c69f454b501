"""The bundled model's tokenizer and chat template."""

import json
from collections.abc import Iterable
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from model.corpus import Dialogue
from model.tools import END_TOOL_CALL, TOOL_CALL, ToolChat

#: Ids of a conversation, and which of them the model has to learn to produce.
Piece = tuple[list[int], list[bool]]

PAD, BEGIN, END = "<pad>", "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = [PAD, BEGIN, END, *(f"<|{role}|>" for role in ROLES)]

#: Take the places of the vocabulary's last tokens when the model is taught to use tools.
TOOL_TOKENS = ("<|tools|>", "<|tool|>", TOOL_CALL, END_TOOL_CALL)

#: Names of tools and parameters, and the results, stand so that their tokens are those that a call
#: and an answer repeat: a leading space makes another token of a word.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|tools|>' -}}
    {%- for tool in tools -%}
        {%- set function = tool['function'] if tool['function'] is defined else tool -%}
        {%- set parameters = function['parameters'] or {} -%}
        {%- set properties = parameters['properties'] or {} -%}
        {%- set required = parameters['required'] or properties -%}
        {{- function['name'] ~ '(' -}}
        {%- for name in properties if name in required -%}
            {%- set property = properties[name] -%}
            {{- name ~ ':' -}}
            {%- if property['enum'] is defined -%}
                {{- property['enum'] | join('|') -}}
            {%- elif property['type'] is string -%}
                {{- property['type'] -}}
            {%- else -%}
                {{- 'string' -}}
            {%- endif -%}
            {{- '' if loop.last else ',' -}}
        {%- endfor -%}
        {{- ')' if loop.last else ')\n' -}}
    {%- endfor -%}
    {{- eos_token -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role: ' ~ message['role']) -}}
    {%- endif -%}
    {%- if message['role'] == 'tool' and loop.first -%}
        {{- raise_exception('a message of role tool must follow a call') -}}
    {%- endif -%}
    {%- set content = (message['content'] or '') | trim -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ (' ' if message['role'] == 'tool') ~ content -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '' if loop.first and not content else '\n' -}}
        {{- '<tool_call>\n{"name": ' ~ (call['function']['name'] | tojson) -}}
        {{- ', "arguments": ' ~ (call['function']['arguments'] | tojson) ~ '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(text: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE: any text in any script can be encoded, rare scripts byte by byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One token per digit: a number's value is then a matter of position, not of spelling.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def with_tool_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with TOOL_TOKENS instead of the last, rarest tokens that were merged, so that
    the vocabulary keeps its size."""
    saved = json.loads(tokenizer.to_str())
    model = saved["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    first = len(by_id) - len(TOOL_TOKENS)
    for gone in by_id[first:]:
        del model["vocab"][gone]
    del model["merges"][-len(TOOL_TOKENS) :]
    grown = Tokenizer.from_str(json.dumps(saved))
    grown.add_special_tokens(list(TOOL_TOKENS))
    return grown


def packaged(tokenizer: Tokenizer, max_length: int) -> Any:
    """The tokenizer with its template, ready for `save_pretrained`."""
    fast = cast(Any, PreTrainedTokenizerFast)  # its constructor has no annotations
    return fast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


class Encoder:
    """Turns conversations into ids and says which of them the model has to learn to produce."""

    def __init__(self, package: Any) -> None:
        """package: what `packaged` makes."""
        self._package = package
        self._begin, self._end = package.convert_tokens_to_ids(["<|assistant|>", END])

    def dialogue(self, dialogue: Dialogue) -> Piece:
        """Ids of the chat template's text; learnt are the answers and their ends."""
        return self._chat(dialogue.messages(), None, 0)

    def tool_chat(self, chat: ToolChat) -> Piece:
        """The same, without the answers among the first messages, which are given."""
        given = sum(message["role"] == "assistant" for message in chat.messages[: chat.given])
        return self._chat(chat.messages, chat.tools, given)

    def _chat(self, messages: Any, tools: Any, given: int) -> Piece:
        text = self._package.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = self._package.encode(text, add_special_tokens=False)
        learnt, answering = [], False
        for token in ids:
            learnt.append(answering and given < 0)
            if token == self._begin:
                answering, given = True, given - 1
            elif token == self._end:
                answering = False
        return ids, learnt

    def text(self, text: str) -> Piece:
        """Plain text: every token after the first is learnt, and so is its end."""
        ids = [*self._package.encode(text, add_special_tokens=False), self._end]
        return ids, [False, *[True] * (len(ids) - 1)]
