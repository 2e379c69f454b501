"""Moving KV between workers: sealed KV chunks, staging buffers and transports.

In: finished positions of a sequence, and the messages of `handover.proto` on gRPC streams.
Out: verified KV in the pool of another worker, or an error with the reason.
"""
