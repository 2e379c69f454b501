"""A decoder of our own for families of models that compute alike.

In: a network of transformers, wired and probed, whose family `recipe` covers. Out: a `Decoder` over
the same weights that computes the same logits in about ten calls a layer (`decoder`), with torch's
operators or, over block-major memory, with Triton's (`kernels`).
"""
