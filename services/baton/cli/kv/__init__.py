"""`baton doctor kv`: how KV would travel between two machines."""
