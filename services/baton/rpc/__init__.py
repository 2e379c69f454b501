"""What all of Baton's processes share at their edges: configuration, gRPC, TLS, telemetry.

In come options, certificates and services; out go a server with health and metrics, channels to
peers, and core's values as messages of baton.v1 and back. Failures cross every wire by the one
table of `errors`.
"""
