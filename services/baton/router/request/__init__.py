"""One request's way through the fleet: admission, placement, attempts, text.

In: a core Request.
Out: its events, in order, until it ends.
"""
