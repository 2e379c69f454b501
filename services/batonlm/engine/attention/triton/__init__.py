"""Kernels in Triton: paged attention and the ways in and out of block-major KV memory.

They know tensors, block tables and constants; neither layers of a model nor steps. Under
TRITON_INTERPRET=1, set before these modules are imported, they run on CPU tensors.
"""
