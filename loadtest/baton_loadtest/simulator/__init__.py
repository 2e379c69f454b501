"""A fleet in virtual time: `core`'s own schedulers and routing policy, with steps of known length.

Comes in: traffic, and what workers can do (a file of speeds, or their own measurements). Goes out:
what became of each request, and figures of the whole. Nothing here waits, opens or starts anything.
"""
