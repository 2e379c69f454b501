"""Tiny random models for vectors and scores, saved as `sentence-transformers` saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.tiny_models import VOCAB, build, save_tokenizer

SIZE = 32
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def _encoder(name: str, folder: Path, **changes: Any) -> None:
    """name: of a class of transformers. Tokens are put between <s> and </s>, as BERT's are."""
    import torch
    import transformers

    torch.manual_seed(0)
    made: Any = getattr(transformers, name)
    config = made.config_class(**{**_SMALL, "max_position_embeddings": 66, **changes})
    made(config).eval().save_pretrained(folder)
    save_tokenizer(folder)
    # BERT tells a pair's texts apart by types, whose second one XLM-R has not.
    _frame(folder, longest=64, types=name.startswith("Bert"))


def _decoder(arch: str, folder: Path, head: str = "") -> None:
    import transformers

    model = build(arch)
    if head:
        model.config.num_labels = 1
        made: Any = getattr(transformers, head)
        model = made(model.config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    _frame(folder, longest=256)


def _frame(folder: Path, *, longest: int, types: bool = False) -> None:
    """Makes the tokenizer put special tokens around texts, without a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in ("<s>", "</s>")}
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=list(ids.items())
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads(path.read_text()) | {
        "pad_token": "<pad>",
        "model_max_length": longest,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *["token_type_ids"] * types, "attention_mask"],
    }
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


def _modules(folder: Path, pooling: str, *more: str, **own: Any) -> None:
    """What `sentence-transformers` writes beside a model."""
    names = ["Transformer", "Pooling", *more]
    listed = []
    for index, name in enumerate(names):
        path = f"{index}_{name}" if index else ""
        (folder / path).mkdir(exist_ok=True)
        kind = f"sentence_transformers.models.{name}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(listed))
    ways = ("cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens", "lasttoken")
    flags = {f"pooling_mode_{way}": way in pooling.split("+") for way in ways}
    size = int(json.loads((folder / "config.json").read_text())["hidden_size"])
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": size, **flags})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps(own))


def _bert_plain(folder: Path) -> None:
    _encoder("BertModel", folder)


def _bert_cls(folder: Path) -> None:
    _encoder("BertModel", folder)
    _modules(folder, "cls_token", "Normalize", max_seq_length=32)
    prompts = {"query": "search: ", "document": "text: "}
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": None})
    )


def _bert_dense(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    _encoder("BertModel", folder)
    _modules(folder, "mean_tokens+max_tokens", "Dense")
    torch.manual_seed(1)
    layer = torch.nn.Linear(2 * SIZE, 24)
    weights = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
    save_file(weights, folder / "2_Dense/model.safetensors")
    (folder / "2_Dense/config.json").write_text(
        json.dumps(
            {
                "in_features": 2 * SIZE,
                "out_features": 24,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
        )
    )


def _xlmr(folder: Path) -> None:
    _encoder("XLMRobertaModel", folder)
    _modules(folder, "mean_tokens", "Normalize")


def _modernbert(folder: Path) -> None:
    _encoder("ModernBertModel", folder, local_attention=8, global_attn_every_n_layers=2)
    _modules(folder, "mean_tokens", "Normalize")


def _qwen3(folder: Path) -> None:
    _decoder("qwen3", folder)
    _modules(folder, "lasttoken", "Normalize")


def _llama(folder: Path) -> None:
    _decoder("llama", folder)
    _modules(folder, "weightedmean_tokens")


EMBED: dict[str, Callable[[Path], None]] = {
    "bert-plain": _bert_plain,
    "bert-cls": _bert_cls,
    "bert-dense": _bert_dense,
    "xlm-roberta": _xlmr,
    "modernbert": _modernbert,
    "qwen3-last": _qwen3,
    "llama-weighted": _llama,
}
SCORE: dict[str, Callable[[Path], None]] = {
    "bert-cross": lambda folder: _encoder("BertForSequenceClassification", folder, num_labels=1),
    "xlm-roberta-cross": lambda folder: _encoder(
        "XLMRobertaForSequenceClassification", folder, num_labels=1
    ),
    "qwen3-cross": lambda folder: _decoder("qwen3", folder, "Qwen3ForSequenceClassification"),
}


def saved(name: str, folder: Path) -> Path:
    """Saves the model in `folder`, which is made, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    {**EMBED, **SCORE}[name](folder)
    return folder


TEXTS = (
    "The quick brown fox",
    "jumps",
    "over the lazy dog. " * 3,
    "a",
    "Builds tiny random-weight models with a tokenizer, saved as folders",
    "The lazy dog jumps over the quick brown fox and another dog.",
)
QUERY = "Which fox is quick?"
