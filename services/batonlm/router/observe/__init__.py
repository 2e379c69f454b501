"""The metrics, traces and records of the router's requests.

In: events of requests. Out: metrics, traces, usage records.
"""
