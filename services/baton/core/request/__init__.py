"""What a client asks for, the attempts at it, and how its answer is read.

In: fields of requests, and tokens.
Out: frozen values that are checked once, and the log of accepted tokens.
"""
