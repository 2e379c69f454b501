"""The decode process: continues sequences, with KV collected from prefill or computed here.

In: attempts, cancels and confirmed positions on a router's session; KV of other workers.
Out: step frames of tokens for each router; KV of sequences that migrate to another decode worker.
"""
