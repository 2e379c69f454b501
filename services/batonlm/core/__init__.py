"""The pure domain: standard library only, no I/O, no clock, no torch."""
