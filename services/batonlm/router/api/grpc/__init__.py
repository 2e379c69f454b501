"""The public gRPC service `baton.v1.Inference`.

In: messages of baton.v1.
Out: core Requests; events as messages.
"""
