"""A request's path through the router: admission, placement, attempts, text.

In: a core Request. Out: its events, in order, until it ends.
"""
