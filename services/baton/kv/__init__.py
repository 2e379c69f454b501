"""Moving KV: parcels, slot rings and transports; knows no gRPC and no scheduler."""
