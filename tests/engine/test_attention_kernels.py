"""Kernels against each other and against attention written down plainly."""

from __future__ import annotations

import pytest
import torch

from batonlm.engine.attention.kernels import Kernel, fewest_rows, flash_cpu, merge, reference
from batonlm.engine.attention.tiles import MaskBank, Tile

CPU = torch.device("cpu")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [16, 24, 64])
def test_kernels_agree_with_softmax_written_down(size: int) -> None:
    query, key, value = random(1, 3, 32, size), random(1, 3, 640, size), random(1, 3, 640, size + 1)
    mask = MaskBank(torch.float32, CPU, 16).take(Tile(0, 624, 16, 624, 640, False), None, 2)
    scores = query @ key.transpose(2, 3) * 0.3 + mask
    wanted = torch.softmax(scores, -1) @ value
    for kernel, width in ((reference, size + 1), (flash_cpu, size)):
        output, lse = kernel(query, key, value[..., :width], mask, 0.3, None)
        torch.testing.assert_close(output, wanted[..., :width], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-4, atol=1e-5)


def test_softcap_bounds_the_scores() -> None:
    query, key, value = random(1, 2, 4, 8) * 100, random(1, 2, 33, 8), random(1, 2, 33, 8)
    scores = torch.tanh(query @ key.transpose(2, 3) * 0.5 / 20) * 20
    output, _ = reference(query, key, value, None, 0.5, 20.0)
    torch.testing.assert_close(output, torch.softmax(scores, -1) @ value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [reference, flash_cpu])
def test_parts_merge_into_the_whole(kernel: Kernel) -> None:
    query, key, value = (random(1, 3, count, 16) for count in (2, 640, 641))
    value = value[:, :, :640]
    whole, whole_lse = kernel(query, key, value, None, 0.3, None)
    cuts = [16, 512, 112]
    pieces = zip(torch.split(key, cuts, 2), torch.split(value, cuts, 2), strict=True)
    merged, lse = merge([kernel(query, k, v, None, 0.3, None) for k, v in pieces])
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-5)


def test_lone_rows_give_the_bits_of_a_whole_tile_at_lengths_not_tried_at_load() -> None:
    rows = fewest_rows(flash_cpu, 2, 3, 32, torch.float32, CPU)
    if rows is None:
        pytest.skip("this CPU computes whole tiles only")
    bank = MaskBank(torch.float32, CPU, 16)
    query = random(1, 2, 48, 32)
    for length in (112, 448, 800, 1040, 1568):
        key, value = random(1, 2, length, 32), random(1, 2, length + 1, 32)[:, :, :length]
        start = length - 16
        mask = bank.take(Tile(0, start, 16, start, length, False), None, 3)
        whole, _ = flash_cpu(query, key, value, mask, 0.2, None)
        for offset in range(16):
            own = slice(offset * 3, offset * 3 + 3)
            mask = bank.take(Tile(0, start + offset, 1, start, length, True), None, 3)
            lone = torch.nn.functional.pad(query[:, :, own], (0, 0, 0, rows - 3))
            got, _ = flash_cpu(lone, key, value, mask, 0.2, None)
            assert torch.equal(got[:, :, :3], whole[:, :, own])
