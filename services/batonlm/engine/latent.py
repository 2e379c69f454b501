"""Multi-head latent attention over the latents themselves (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

Such a layer computes, of a position, a latent c and one rotated key r for all heads, and from the
latent the keys and values of head h: k = U_h c, v = V_h c, where U and V are the halves of
`kv_b_proj`. Scores q.(U_h c) equal (q U_h).c, and a weighted sum of V_h c is V_h times the weighted
sum of c. So queries and outputs are multiplied by U and V, and attention has one KV head: its key
is c and r, its value is the key's beginning. What is kept of a position is c and r.

Sums are made in another order than in transformers' own attention: results agree but for rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batonlm.engine.exact import MOST, Product, in_tiles, prove, random_rows, tiled

Sizes = frozenset[int]


class LatentProjection(nn.Module):
    """Takes the place of a layer's `kv_b_proj`, whose weight it takes over.

    It stays in the model's number type where other layers are quantized: it is a small share of a
    model's weights, and each of its products is small.
    """

    def __init__(self, linear: nn.Linear, key_size: int, value_size: int):
        """linear: [heads * (key_size + value_size) outputs, latent_size inputs], head by head."""
        super().__init__()
        self.latent_size = linear.in_features
        by_head = linear.weight.detach().view(-1, key_size + value_size, self.latent_size)
        keys, values = by_head[:, :key_size], by_head[:, key_size:]
        self.heads = len(by_head)
        self.keys = nn.Parameter(keys.flatten(0, 1), requires_grad=False)
        """[heads * key_size, latent_size]."""
        self.values = nn.Parameter(values.transpose(1, 2).flatten(0, 1), requires_grad=False)
        """[heads * latent_size, value_size]."""
        self.sizes: tuple[Sizes | None, Sizes | None] = (None, None)
        """Of the products with keys and values, the numbers of rows that are computed at once;
        None when any is right."""

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """[heads, T, key_size + rest] -> [heads, T, latent_size + rest]: what meets latents, and
        behind it what meets rotated keys, as it is. Laid out [T, heads, ...]."""
        size = len(self.keys) // self.heads
        by_token = query.transpose(0, 1)
        absorbed = self._multiply(by_token[..., :size], self.keys, self.sizes[0])
        return torch.cat((absorbed, by_token[..., size:]), -1).transpose(0, 1)

    def outputs(self, output: torch.Tensor) -> torch.Tensor:
        """Sums of latents [T, heads, latent_size] -> of values [T, heads, value_size]."""
        return self._multiply(output, self.values, self.sizes[1])

    def prove(self) -> Sizes:
        """Settles the numbers of rows that give bit-equal ones, those of both products. Raises
        NotExact."""
        keys, values = (self._proven(weight) for weight in (self.keys, self.values))
        self.sizes = keys, values
        return keys & values

    def loosen(self) -> None:
        """Gives exactness up."""
        self.sizes = (None, None)

    def _multiply(
        self, rows: torch.Tensor, weight: torch.Tensor, sizes: Sizes | None
    ) -> torch.Tensor:
        """[T, heads, inputs] by [heads * inputs, outputs] -> [T, heads, outputs]."""
        if sizes is None or len(rows) in sizes:
            by_head = weight.view(self.heads, -1, weight.shape[1])
            return torch.bmm(rows.transpose(0, 1), by_head).transpose(0, 1)
        product = tiled(self._flat(weight), rows.flatten(1), sizes)
        return product.view(len(rows), self.heads, -1)

    def _flat(self, weight: torch.Tensor) -> Product:
        """The product of rows [n, heads * inputs], whose results are [n, heads * outputs]."""

        def product(rows: torch.Tensor) -> torch.Tensor:
            by_head = rows.view(len(rows), self.heads, -1)
            return self._multiply(by_head, weight, None).flatten(1)

        return product

    def _proven(self, weight: torch.Tensor) -> Sizes:
        product = self._flat(weight)
        rows = random_rows(len(weight), weight.dtype, weight.device, MOST)
        return prove(product, rows, in_tiles(product, rows))


def keep_latents(network: nn.Module) -> None:
    """Has every latent attention layer of transformers pass latents on to attention.

    Such a layer has a method `expand_kv`, which makes keys and values of latents [1, 1, T, size]
    and rotated keys [1, 1, T, size]. It is replaced; `paged` then does what is left.
    """
    module: Any
    for module in network.modules():
        if not callable(getattr(module, "expand_kv", None)):
            continue
        linear = module.kv_b_proj
        if type(linear) is nn.Linear and linear.bias is None:
            module.kv_b_proj = LatentProjection(
                linear,
                int(module.qk_nope_head_dim),
                int(module.v_head_dim),
            )
            module.expand_kv = _as_they_are


def keeps_latents(network: nn.Module) -> bool:
    """Whether `keep_latents` has changed a layer."""
    return any(isinstance(module, LatentProjection) for module in network.modules())


def _as_they_are(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`: the key is latent and rotated key, the value is its start."""
    key = torch.cat((latent, rotated), -1)
    return key, key[..., : latent.shape[-1]]


def projection_of(module: nn.Module) -> LatentProjection | None:
    """Of an attention layer that `keep_latents` has changed."""
    found = getattr(module, "kv_b_proj", None)
    return found if isinstance(found, LatentProjection) else None
