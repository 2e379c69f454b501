"""The public entries of the router: HTTP, gRPC, and vLLM's gRPC service.

In: bytes and messages of clients.
Out: core Requests; events as answers.
"""
