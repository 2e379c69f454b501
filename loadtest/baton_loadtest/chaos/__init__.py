"""`baton chaos`: breaks things on purpose, in processes of its own, and counts what came of it."""
