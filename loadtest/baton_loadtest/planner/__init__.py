"""What a fleet would take and cost, and whether to split it, before it is there.

Comes in: a model's config.json, GPUs' data sheets or running workers' own measurements, traffic,
targets. Goes out: `baton plan memory | fleet | split`, as text and as figures. It uses the
simulator for `split`; it starts nothing and changes nothing.
"""
