"""`baton batch`: many requests from a file, answered into a file while there is idle capacity."""
