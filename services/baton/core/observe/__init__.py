"""What is remembered and told of a request: its stages, attempts, reasons and replay.

In: what happened, with times that others read.
Out: plain records.
"""
