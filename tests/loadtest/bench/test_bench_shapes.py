"""What is read of a model without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import InvalidArgument
from baton_loadtest.bench import engines


@pytest.mark.parametrize(("tied", "expected"), [(True, 10 * 4 + 4), (False, 4 + 10 * 4)])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(
    tied: bool, expected: int, tmp_path: Path
) -> None:
    weights = {"model.embed_tokens.weight": torch.zeros(10, 4), "model.norm.weight": torch.zeros(4)}
    if not tied:
        weights["lm_head.weight"] = torch.zeros(10, 4)
    save_file(weights, tmp_path / "model.safetensors")
    assert engines.weights_read(tmp_path, {"tie_word_embeddings": tied}) == expected


def test_kv_of_the_100m_shape() -> None:
    assert engines.kv_bytes(engines.SHAPES["100m"]) == 2 * 12 * 4 * 64 * 4
    assert engines.kv_bytes(engines.SHAPES["500m"]) == 2 * 28 * 8 * 128 * 4


def test_any_models_folder_is_a_shape(tmp_path: Path) -> None:
    assert engines.folder(str(tmp_path)) == tmp_path
    with pytest.raises(InvalidArgument):
        engines.folder("no-such-shape")
