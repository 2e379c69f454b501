"""The detokenizer process: token ids become text.

In come the tokens of all choices of a router, over one stream; out goes the text of each that is
ready, up to its stop string. The same ids give the same bytes, however they are cut into messages.
"""
