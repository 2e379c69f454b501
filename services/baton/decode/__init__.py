"""The decode process: collects KV and continues sequences."""
