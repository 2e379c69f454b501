"""Plans a fleet: its size, its cost, and whether to split it into prefill and decode.

In: a model's config.json, GPU data sheets or running workers' measurements, traffic, targets.
Out: `baton plan memory | fleet | split`, as text and figures. `split` uses the simulator. Nothing
is started or changed.
"""
