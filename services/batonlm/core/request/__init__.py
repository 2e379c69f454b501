"""A client's request, the attempts that run it, and the readers of its answer.

In: fields of requests, and tokens. Out: frozen values that are checked once, and the log of
accepted tokens.
"""
