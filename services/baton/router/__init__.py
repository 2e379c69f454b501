"""The router process: the only place that knows a request's life."""
