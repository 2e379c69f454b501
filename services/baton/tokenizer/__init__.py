"""The tokenizer process: prompts, texts and conversations become token ids, and ids text.

In come requests of `baton.v1.Tokenizer`; out go checked token ids with the hashes of their prefix.
Chat templates and grammars are other people's programs: they run in processes of their own, with
limits, that can be killed (`Renderers`, `Checker`).
"""
