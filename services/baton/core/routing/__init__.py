"""Which workers run an attempt, what it would cost there, and when a worker gets none.

In: snapshots of workers, demands.
Out: a decision with its reasons.
"""
