"""What prefill and decode workers share: options, the engine and the KV side put together."""
