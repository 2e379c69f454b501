"""What a client asked for, what an attempt at it is, and how its answer is read.

In: fields of requests and tokens.
Out: frozen values, checked once, and the log of accepted tokens.
"""
