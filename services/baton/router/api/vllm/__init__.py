"""`vllm.grpc.engine.VllmEngine`, somebody else's protocol: a whole Baton as a gateway's engine.

The messages are those of the package smg-grpc-proto, an optional part of the installation
(`baton[vllm]`). Only `optional` may be imported without it.
"""
