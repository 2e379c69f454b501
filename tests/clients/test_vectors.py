"""Vectors and scores equal those of sentence-transformers, installed as its users would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from batonlm.core.request.request import TextPair, VectorInput
from batonlm.encode.model import EncoderModel, Sequences
from tests.clients.conftest import RUN_S, beside_ours
from tests.encode.models import EMBED, QUERY, SCORE, TEXTS, saved

pytestmark = pytest.mark.clients

PACKAGES = (
    "sentence-transformers",
    "scikit-learn",
    "scipy",
    "joblib",
    "threadpoolctl",
    "narwhals",
    "cloudpickle",
)
"""Without what it requires of torch and transformers: those of this environment are used."""
CLOSE = 2e-5
SCRIPT = Path(__file__).parent / "scripts/with_sentence_transformers.py"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside_ours(tmp_path_factory.mktemp("venv"), PACKAGES)


@pytest.mark.timeout(900)
def test_sentence_transformers(python: Path, tmp_path: Path) -> None:
    folders = {name: str(saved(name, tmp_path / name)) for name in (*EMBED, *SCORE)}
    asked = {
        "texts": TEXTS,
        "query": QUERY,
        "embed": {name: folders[name] for name in EMBED},
        "score": {name: folders[name] for name in SCORE},
    }
    done = subprocess.run(
        [python, SCRIPT, json.dumps(asked)], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    for name, folder in folders.items():
        model = EncoderModel(
            Path(folder), "", dtype="auto", device="cpu", progress=lambda read, total: None
        )
        inputs: list[VectorInput] = [*TEXTS]
        if name in SCORE:
            inputs = [TextPair(QUERY, text) for text in TEXTS]
        made = [each for each in model.tokenize(inputs, -1) if isinstance(each, Sequences)]
        ours = torch.full((len(made), model.size), float("nan"))
        for indexes, numbers in model.compute(made, 64):
            ours[indexes] = numbers
        expected = torch.tensor(theirs[name])
        assert torch.allclose(ours, expected, rtol=0, atol=CLOSE), name
