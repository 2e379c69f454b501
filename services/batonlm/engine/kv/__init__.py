"""The memory of the block pool.

In: extents of blocks and positions, KV of a layer, payloads of KV chunks. Out: places, tensors and
payloads, and blocks that wait in swap memory.
"""
