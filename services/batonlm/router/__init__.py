"""The router process: runs each request from arrival to its last event."""
