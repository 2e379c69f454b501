"""What all of Baton's processes share at their edges: configuration, gRPC, TLS, telemetry.

The package takes options, certificates and services, and provides a server with health and metrics,
channels to peers, and the conversion between core's values and messages of baton.v1. `errors` holds
the one table by which failures cross every wire.
"""
