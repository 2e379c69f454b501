"""The decode process: continues sequences, with KV from a prefill worker or computed here.

It takes attempts, cancels and confirmed positions on each router's session, and KV from other
workers. It returns step frames of tokens to each router, and sends the KV of sequences that migrate
to another decode worker.
"""
