"""The files of a model's folder that tokenizer and detokenizer both read, and their digest.

Both must agree on the special tokens, or one would hide a token that the other shows.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batonlm.core.errors import InvalidArgument

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object; empty when there is no file. Raises InvalidArgument naming `model`
    for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON", field="model") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} is not a JSON object", field="model")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens in tokenizer_config.json, by name.

    A token is a string, or an object with its `content`. In older folders, special_tokens_map.json
    comes first.
    """
    config = read_json(folder / "tokenizer_config.json")
    old = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
    values = {name: old.get(name, config.get(name)) for name in _NAMES}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""All files that tokenizer and detokenizer read."""


def tokenizer_digest(folder: Path) -> str:
    """The BLAKE2b-128 in hex over name, length and bytes of each file of FILES that exists."""
    digest = blake2b(digest_size=16)
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def check_same_tokenizer(folder: Path, draft: Path) -> None:
    """Raises InvalidArgument naming `draft_model` where one token means another text in the draft
    model's folder. A folder without tokenizer.json, and a hub id, are taken at their word."""
    ours, theirs = (read_json(each / "tokenizer.json") for each in (folder, draft))
    if not (ours and theirs):
        return
    found, wanted = _texts(theirs), _texts(ours)
    for token_id, text in wanted.items():
        if found.get(token_id) != text:
            raise InvalidArgument(
                f"its tokenizer is another one: token {token_id} is {found.get(token_id)!r} and "
                f"not {text!r}",
                field="draft_model",
            )


def _texts(tokenizer: dict[str, Any]) -> dict[int, str]:
    """The tokens of a tokenizer.json by id."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        found = {token_id: text for text, token_id in vocabulary.items()}
    else:
        found = {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
    return found | {added["id"]: added["content"] for added in tokenizer.get("added_tokens", ())}
