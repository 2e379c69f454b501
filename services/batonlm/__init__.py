"""Baton: a disaggregated LLM server with every stage in its own pool."""
