"""Breaks things on purpose and counts what becomes of requests: `baton chaos`.

`kv` experiments break hand-overs between two processes or in a small fleet with made-up models;
`streams` holds the schedules of `run`, in which processes of a whole Baton die, stop, leave or are
cut off while streams run. Each experiment is a module with `measure(args)`.
"""
