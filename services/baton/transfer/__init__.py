"""Moving KV between workers: sealed KV chunks, staging buffers and transports.

In: finished positions of a sequence, messages of the peer.
Out: verified KV in the pool of another worker, or an error that says why not.
"""
