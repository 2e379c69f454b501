"""Generated from protos/baton/v1 by scripts/gen_protos.py. Never edited."""
