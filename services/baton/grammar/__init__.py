"""Grammars that answers follow, by llguidance.

In comes a Grammar of a request; out goes, position by position, the mask of tokens that may follow.
`compiler` compiles one within limits; `book` keeps a worker's compiled grammars and their matchers.
"""
