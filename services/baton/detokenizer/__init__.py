"""The detokenizer process: token ids become text."""
