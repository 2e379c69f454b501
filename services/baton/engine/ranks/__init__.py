"""One model computed by several ranks, tensor-parallel, behind the one ModelRunner port.

In: step plans and payloads, at `runner.RankedRunner`. It sends them as messages to its ranks, Ray
actors (`ray_ranks`); tests have threads in their place. Each is a `rank.Rank`: its heads, its slice
of the weights (`shards`), its KV. Out: rank 0's results, and payloads in `shared` memory.
"""
