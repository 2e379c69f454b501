"""The bundled model's tokenizer and chat template."""

from collections.abc import Iterable
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from model.corpus import Dialogue

PAD, BEGIN, END = "<pad>", "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = [PAD, BEGIN, END, *(f"<|{role}|>" for role in ROLES)]

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('unknown role: ' ~ message['role']) -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ eos_token -}}
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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        # The trainer numbers the special tokens first, in their order.
        self._id = {token: number for number, token in enumerate(SPECIAL)}

    def _encode(self, text: str) -> list[int]:
        # Answers repeat far more often than they differ; encoding would take a tenth of a step.
        ids = self._cache.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 50_000:
                self._cache[text] = ids
        return ids

    def dialogue(self, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
        """Ids as the chat template would give them; learnt are the answers and their ends."""
        ids, learnt = [self._id[BEGIN]], [False]
        for message in dialogue.messages():
            content = self._encode(message["content"])
            is_answer = message["role"] == "assistant"
            ids += [self._id[f"<|{message['role']}|>"], *content, self._id[END]]
            learnt += [False, *[is_answer] * (len(content) + 1)]
        return ids, learnt

    def text(self, text: str) -> tuple[list[int], list[bool]]:
        """Plain text: every token after the first is learnt, and so is its end."""
        ids = [*self._encode(text), self._id[END]]
        return ids, [False, *[True] * (len(ids) - 1)]
