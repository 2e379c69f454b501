"""Paged attention: a `Backend` for a model and a device.

In: a StepPlan, which `Backend.begin` turns into the network's inputs, and each layer's queries,
keys and values. Out: attention's output, with the step's KV written to the block pool's memory.
"""
