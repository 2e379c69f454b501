"""`baton loadtest`: an open-loop load generator.

In: a scenario or a trace. Out: latencies from when a request was due, rates, goodput, and the
highest rate within objectives, as a table, a JSON file or a page.
"""
