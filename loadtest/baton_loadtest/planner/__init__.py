"""What a pool would take and cost, from a model, GPUs, traffic and targets, before it is there."""
