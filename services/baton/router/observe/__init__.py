"""What the router counts and records of requests, and under which names.

In: what requests do.
Out: metrics, traces, usage records.
"""
