"""The tokenizer process: converts prompts, texts and conversations to token ids, and ids to text.

It takes requests of `baton.v1.Tokenizer` and returns checked token ids with the hashes of their
prefix. Chat templates and grammars are untrusted programs: they run in separate processes, with
limits, that can be killed (`Renderers`, `Checker`).
"""
