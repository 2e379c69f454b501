"""A vocabulary read from a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from batonlm.core.errors import InvalidArgument
from batonlm.detokenizer.text import IncrementalText
from batonlm.detokenizer.vocabulary import Vocabulary
from tests.services.tokenizer.made_tokenizers import FAMILIES, TEXTS, id_of, made
from tests.services.tokenizer.model_folders import write_folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_decodes_as_transformers_does(family: str, skip: bool, tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, family, eos_token="e", unk_token={"content": "fox", "__type": "AddedToken"}
    )
    theirs = AutoTokenizer.from_pretrained(folder)
    vocabulary = Vocabulary.load(folder)
    for text in TEXTS:
        ids = made(family).encode(text).ids
        mine = IncrementalText(vocabulary, skip_special_tokens=skip)
        streamed = "".join(map(mine.push, ids)) + mine.finish()
        assert streamed == theirs.decode(ids, skip_special_tokens=skip)


def test_tokens_that_the_configuration_names_are_special(tmp_path: Path) -> None:
    tool_call = id_of(made("byte_level"), "<tool_call>")
    assert not Vocabulary.load(write_folder(tmp_path / "a")).is_special(tool_call)
    named = write_folder(tmp_path / "b", eos_token={"content": "<tool_call>"})
    assert Vocabulary.load(named).is_special(tool_call)
    old = write_folder(tmp_path / "c")
    (old / "special_tokens_map.json").write_text('{"eos_token": "<tool_call>"}')
    assert Vocabulary.load(old).is_special(tool_call)


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": {"type": "BPE"}}', "[]"])
def test_a_broken_folder_names_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidArgument) as raised:
        Vocabulary.load(tmp_path)
    assert raised.value.field == "model"
