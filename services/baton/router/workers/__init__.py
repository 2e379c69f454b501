"""The fleet as this router knows it: discovery, links, sessions, clients.

In: addresses, reports of workers.
Out: snapshots for routing, streams for requests.
"""
