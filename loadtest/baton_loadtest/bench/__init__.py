"""`baton bench`: measures Baton, and compares within one run.

Comes in: the options of one benchmark. Goes out: a Report of figures and charts. Each benchmark is
a module of its name that reads like an experiment: options, set-up, two sides, figures with goals.
Several need `engines` (models, an engine in this process), `options`, `peers` (other people's
engines), `synthetic` (workers without a model) or `known_server` (drawn latencies).
"""
