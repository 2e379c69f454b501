"""What is recorded of a request: its stages, its attempts, why they ran where, its replay.

In: what happened, with times that the caller reads.
Out: plain records.
"""
