"""Which workers run an attempt, the predicted cost, and when a worker gets no attempts.

In: snapshots of workers, demands. Out: a decision with its reasons.
"""
