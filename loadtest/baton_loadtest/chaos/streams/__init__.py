"""The schedules of `baton chaos run`: kills, routers, partitions, rolling, slow links.

Comes in: a fleet, streams whose answers are known, and what is to happen to the fleet meanwhile.
Goes out: how many streams ended with their own tokens, and how long the worst pause was.
"""
