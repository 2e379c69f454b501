"""Tells whether two folders hold the same tokenizer; reads no tokenizer."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""All that tokenizer and detokenizer read."""


def tokenizer_digest(folder: Path) -> str:
    """BLAKE2b-128, hex, over name, length and bytes of each of FILES that exists."""
    digest = blake2b(digest_size=16)
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
