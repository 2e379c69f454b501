"""The schedules of `baton chaos run`: kills, routers, partitions, rolling, slow links.

In: a fleet, streams whose answers are known, and the faults to inject.
Out: how many streams ended with their expected tokens, and the longest pause.
"""
