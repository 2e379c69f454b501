"""Tiers behind a worker's prefix cache: host memory, a folder, and a store that workers share.

Comes in: units of the prefix cache that are about to be evicted, and inputs of attempts. Goes out:
units in a tier, sealed as on the wire, and later KV in the prefix cache again. `places` keeps
sealed units, `prefix_tiers` decides which and moves them.
"""
