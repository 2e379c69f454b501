"""Model folders with a tokenizer, as they lie on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.core.request import Prompt
from baton.tokenizer import files
from baton.tokenizer.client_templates import ClientTemplates
from baton.tokenizer.encoder import Asked, Encoded, Encoder
from tests.services.tokenizer.made_tokenizers import made

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
    max_input_bytes: int = 1 << 20,
    max_render_s: float = 5.0,
    max_cache_bytes: int = 1 << 20,
    client_templates: ClientTemplates | None = None,
) -> Encoder:
    return Encoder(
        files.load(folder),
        namespace="test",
        max_input_bytes=max_input_bytes,
        max_render_s=max_render_s,
        max_cache_bytes=max_cache_bytes,
        client_templates=client_templates,
    )


def encoded(encoder: Encoder, prompt: Prompt, cache_salt: bytes = b"") -> Encoded:
    """One prompt alone. Raises what the encoder has against it."""
    (result,) = encoder.encode([Asked(prompt, cache_salt)])
    if isinstance(result, BatonError):
        raise result
    return result


def ids_of(encoder: Encoder, prompt: Prompt) -> list[int]:
    return encoded(encoder, prompt).token_ids.tolist()
