"""Benchmarks, chaos, the load generator, the simulator and the planner.

In: a running Baton, or a description of one. Out: figures, as tables and JSON files. This package
uses all of `baton`, which never imports it. `baton bench`, `chaos`, `loadtest`, `simulate` and
`plan` use it if it is installed.
"""
