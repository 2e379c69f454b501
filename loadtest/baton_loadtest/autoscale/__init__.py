"""`baton-planner`: the sizes of prefill and decode on a Kubernetes cluster.

In: what routers measure, and the cluster's API. Out: an external metric for HPAs, or the sizes
themselves. `forecast` and `decide` are pure; `cluster` speaks to the API, `metrics_api` serves the
metric, `process` is the loop.
"""
