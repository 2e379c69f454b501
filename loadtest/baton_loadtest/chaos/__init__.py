"""Injects faults and counts the outcomes of requests: `baton chaos`.

`kv` experiments break hand-overs between two processes or in a small fleet with made-up models;
`streams` has the schedules of `run`, in which processes of a whole Baton die, stop, leave or are
disconnected while streams run. Each experiment is a module with `measure(args)`.
"""
