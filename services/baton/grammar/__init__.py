"""Grammars in terms of a model's tokens, on tokenizers and on workers. The router loads no part."""
