"""A model's own head as its draft model: one more layer, trained to foretell one token more.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, 2.2): the layer computes a position from the
token there and from what the network computed at the position before, ahead of the product into
logits. Out comes, by the network's own product, the next token. For further tokens it takes its own
output of the position before in the place of the network's.

The layer attends, so it has KV, which are kept here and nowhere else: they begin where this worker
began to decode a sequence, and reach back WINDOW positions at most. So prefill need not compute the
layer, and nothing of it is handed over; a draft may be wrong.

The layer's code and the names of its weights are those of transformers' `MtpModel`.

In: what the network computes in each step. Out: likely tokens, by the port `DraftModel`.
"""
