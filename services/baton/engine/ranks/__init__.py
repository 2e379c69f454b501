"""One model computed by several ranks, tensor-parallel, behind the one ModelRunner port.

`runner` speaks to ranks through the port `port.Ranks`: Ray actors (`ray_ranks`), or threads of the
same process (`local`). Each is a `rank.Rank`: its heads, its slice of the weights, its KV.
"""
