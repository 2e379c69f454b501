"""Who owns each block of KV memory, and which prefixes it holds.

In: token ids, block numbers.
Out: block tables, grants of swap memory, hashes of prefixes, cache events.
"""
