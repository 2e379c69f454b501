"""Prefix chains of tokens that tests make up."""

from __future__ import annotations

from batonlm.core.kvcache.prefix import PrefixChain, namespace

MODEL, TOKENIZER = "model", "tokenizer"


def chain_of(tokens: list[int], size: int, salt: bytes = b"") -> PrefixChain:
    """All whole blocks of so many positions."""
    chain = PrefixChain(namespace(salt, MODEL), namespace(salt, TOKENIZER), size)
    chain.extend(tokens, len(tokens) // size)
    return chain
