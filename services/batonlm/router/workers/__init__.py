"""The fleet as this router sees it: discovery, links, sessions, clients.

In: addresses, reports of workers. Out: snapshots for routing, streams for requests.
"""
