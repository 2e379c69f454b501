"""The public APIs of the router: HTTP, gRPC, and vLLM's gRPC service.

In: bytes and messages of clients, which `access` authenticates. Out: core Requests for the
Pipeline; its events as answers.
"""
