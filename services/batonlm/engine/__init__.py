"""The engine: turns step plans into tokens with torch.

In: a StepPlan, on the engine thread (`thread`), for a model of transformers (`loader`), or for one
that ranks compute together (`ranks`). Out: a StepResult, and KV of positions as payloads (`kv`).
`runner` puts together `attention`, `linear` layers, the `sampler` and memory (`footprint`).
"""
