"""Two folders have the same digest exactly when they hold the same tokenizer."""

from __future__ import annotations

from pathlib import Path

from batonlm.rpc.model_folder import FILES, tokenizer_digest


def folder(path: Path, files: dict[str, str]) -> str:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return tokenizer_digest(path)


def test_what_counts(tmp_path: Path) -> None:
    files = dict.fromkeys(FILES, "text")
    digest = folder(tmp_path / "a", files)
    assert len(digest) == 32 and int(digest, 16) >= 0
    assert folder(tmp_path / "b", {**files, "model.safetensors": "x"}) == digest
    others = [
        folder(tmp_path / "c", {**files, "tokenizer.json": "other"}),
        folder(tmp_path / "d", {name: "text" for name in FILES[:2]}),
        folder(tmp_path / "e", {FILES[0]: "textt", FILES[1]: "ext", FILES[2]: "text"}),
        folder(tmp_path / "f", {}),
    ]
    assert len({digest, *others}) == 5
