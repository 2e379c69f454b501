"""`baton bench`: measures Baton, and compares within one run.

In: the options of one benchmark. Out: a Report of figures and charts. Each benchmark is a module of
its name that reads like an experiment: options, set-up, two sides, figures with goals. Several use
`engines` (models, an engine in this process), `options`, `peers` (other engines), `synthetic`
(workers without a model) or `known_server` (known latencies).
"""
