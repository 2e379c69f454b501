"""Records of a request: its stages, its attempts, the reasons for its placement, its replay.

In: events, with times that the caller reads. Out: plain records.
"""
