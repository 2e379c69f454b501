"""`baton loadtest`: sends requests when they are due, whatever became of those before.

Comes in: a scenario or a trace. Goes out: latencies from when a request was due, rates, goodput,
and the highest rate within objectives, as a table, a JSON file or a page.
"""
