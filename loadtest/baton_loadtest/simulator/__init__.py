"""Simulates a fleet in virtual time, with core's schedulers and routing policy.

In: traffic, and workers' speeds (from a file, or from running workers). Out: the outcome of each
request, and overall figures. Nothing here waits, opens a connection or starts a process.
"""
