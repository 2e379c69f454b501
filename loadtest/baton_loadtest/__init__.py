"""Benchmarks, chaos, the load generator, the simulator and the planner.

Comes in: a Baton that runs, or a description of one. Goes out: figures, as tables and JSON files.
It uses everything below `baton`; nothing there imports it. `baton bench`, `chaos`, `loadtest`,
`simulate` and `plan` find it where it is installed.
"""
