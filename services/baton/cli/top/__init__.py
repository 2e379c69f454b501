"""`baton top`: what a running Baton does now, in a terminal."""
