"""The encode process: computes vectors of texts, and scores of pairs of texts.

It takes batches of `baton.v1.Encode` and answers with float32 numbers. The model is an encoder, a
cross-encoder, or a decoder whose hidden states are pooled: prefill without decode, so it keeps no
KV. Texts come as texts, because its tokenizer is not the one of the model that generates.
"""
