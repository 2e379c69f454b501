"""`baton doctor kv`: checks how KV would be transferred between two machines."""
