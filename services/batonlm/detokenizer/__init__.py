"""The detokenizer process: converts token ids to text.

It takes the tokens of all choices of a router over one stream, and returns each choice's text as
soon as it is ready, up to its stop string. The same ids give the same bytes, however they are
grouped into messages.
"""
