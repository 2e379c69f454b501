"""Reads what a model folder says about its tokenizer. Renders and encodes nothing.

The result encodes as `transformers.AutoTokenizer` does, without importing it:

- truncation and padding that were saved with tokenizer.json are switched off;
- tokens that tokenizer_config.json names (bos_token, eos_token, ...) are special, even where
  tokenizer.json does not say so; names of tokens that do not exist are ignored;
- what stands around plain text is tokenizer.json's affair alone (`add_bos_token` does not count);
- the chat template is chat_template.jinja, or else `chat_template` of tokenizer_config.json: a
  text, or a list of named ones of which "default" counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.core.errors import InvalidArgument
from baton.rpc.model_folder import read_json, special_tokens


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """special_tokens: text by name, as chat templates see them."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None


def load(folder: Path) -> TokenizerFiles:
    """Raises InvalidArgument naming `model` when the folder cannot be used."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise InvalidArgument(f"there is no folder {folder}", field="model")
    if not path.is_file():
        raise InvalidArgument(f"{folder} has no tokenizer.json", field="model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidArgument(f"{path} is not a tokenizer ({error})", field="model") from error
    named = special_tokens(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _mark_special(tokenizer, named)
    return TokenizerFiles(tokenizer, named, _chat_template(folder))


def _mark_special(tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(named.values())
            if text not in special and tokenizer.token_to_id(text) is not None
        ]
    )


def _chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except ValueError as error:
            raise InvalidArgument(f"{path} is not UTF-8", field="model") from error
    template: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = (entry for entry in template if isinstance(entry, dict))
        template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidArgument("chat_template in tokenizer_config.json is no text", field="model")
    return template
