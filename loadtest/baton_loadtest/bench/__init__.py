"""`baton bench`: measures Baton, and compares within one run; nothing that serves imports it."""
