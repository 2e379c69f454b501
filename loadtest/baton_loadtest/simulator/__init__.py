"""A discrete-event simulation of a fleet that runs core's own schedulers and routing policy."""
