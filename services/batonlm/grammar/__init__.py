"""Grammars that constrain answers, with llguidance.

The package takes a request's Grammar and returns, for each position, the mask of allowed tokens.
`compiler` compiles a grammar within limits; `book` keeps a worker's compiled grammars and matchers.
"""
