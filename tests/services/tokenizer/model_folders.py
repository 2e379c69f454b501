"""Model folders with a tokenizer, as they lie on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batonlm.core.errors import BatonError
from batonlm.core.request.request import Prompt
from batonlm.tokenizer.encoder import Asked, Encoded, Encoder, load_tokenizer
from batonlm.tokenizer.renderers import Renderers
from tests.services.tokenizer.made_tokenizers import made

RENDERERS = Renderers(cpu_s=5.0, max_characters=1 << 20)
"""Of all tests that have no bounds of their own: processes take a while to start."""

CHATML = """\
{%- for message in messages %}
    {{- '<|user|>' + message.role + '\\n' + message['content'] + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|user|>assistant\\n' }}
{%- endif %}
"""


def write_folder(
    folder: Path,
    family: str = "byte_level",
    *,
    chat_template: str | None = CHATML,
    **config: Any,
) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and, if any, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    made(family).save(str(folder / "tokenizer.json"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, "utf-8")
    return folder


def encoder_of(
    folder: Path,
    *,
    renderers: Renderers = RENDERERS,
    max_input_bytes: int = 1 << 20,
    max_cache_bytes: int = 1 << 20,
    client_renderers: Renderers | None = None,
    special_tokens_in_text: bool = False,
) -> Encoder:
    return Encoder(
        load_tokenizer(folder),
        namespace="test",
        max_input_bytes=max_input_bytes,
        max_cache_bytes=max_cache_bytes,
        renderers=renderers,
        client_renderers=client_renderers,
        special_tokens_in_text=special_tokens_in_text,
    )


def encoded(encoder: Encoder, prompt: Prompt, cache_salt: bytes = b"") -> Encoded:
    """One prompt alone. Raises what the encoder has against it."""
    (result,) = encoder.encode([Asked(prompt, cache_salt)])
    if isinstance(result, BatonError):
        raise result
    return result


def ids_of(encoder: Encoder, prompt: Prompt) -> list[int]:
    return encoded(encoder, prompt).token_ids.tolist()
