"""Everything gRPC that is not business: servers, channels, errors, configuration, conversion."""
