"""A model that makes vectors of texts, or scores of pairs: its files, its tokenizer, its batches.

A folder is what `sentence-transformers` writes: `modules.json` names the parts behind the
transformer (pooling, dense layers, normalisation), `sentence_bert_config.json` the longest input,
`config_sentence_transformers.json` prompts. A folder without these is mean pooling over a plain
model, as there. A model for sequence classification with one label is a cross-encoder, which
scores pairs. What would be computed otherwise than there is refused at load.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from batonlm.core.errors import BatonError, ContextLengthExceeded, InvalidArgument
from batonlm.core.request.model import ModelDescription, ModelTask
from batonlm.core.request.request import TextPair, VectorInput
from batonlm.core.request.validation import wrong
from batonlm.engine.checkpoint import UnsupportedModel, check_files
from batonlm.engine.device import choose_device, upload
from batonlm.engine.kv.cache import DTYPES
from batonlm.engine.lean import transformers, without_compiler
from batonlm.engine.loader import Bar, Progress, quiet
from batonlm.registry.digest import model_digest
from batonlm.rpc.model_folder import read_json, tokenizer_digest

log = logging.getLogger(__name__)

EVENNESS = 0.75
"""The shortest sequence of a batch has at least this share of the longest one's tokens, so that at
most a quarter of what is computed is padding."""

_FEW = 16
"""Sequences of up to this many tokens go together whatever their lengths."""

CHECKED = 1e-2
"""Most by which a vector, of length 1, may move when a longer text is beside it. Number types of 16
bits move it by some thousandths; a model that reads padding moves it by far more."""

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How `sentence-transformers` names ways to pool in its files, older spelling and newer."""

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
}


@dataclass(frozen=True, slots=True)
class Sequences:
    """A tokenized input."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
    """Which of a pair's texts each token is of; empty: all of the first."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """What follows the transformer, in order."""

    poolings: tuple[str, ...]
    parts: tuple[nn.Module, ...]
    """Dense layers and normalisations, which take and give [batch, size]."""
    normalizes: bool
    """Whether vectors have length 1 in the end."""


class _Dense(nn.Module):
    def __init__(self, layer: nn.Linear, activation: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layer = layer
        self.activation = activation

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.activation(self.layer(vectors))


class _Normalize(nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(vectors, dim=-1)


class EncoderModel:
    """A loaded model. `tokenize` may be called on any thread, `compute` on the one that loaded."""

    def __init__(self, folder: Path, name: str, *, dtype: str, device: str, progress: Progress):
        """name: that clients use; "": the folder's. Raises UnsupportedModel naming what is wrong
        with the files."""
        weights = check_files(folder)
        kind = str(read_json(folder / "config.json").get("model_type", ""))[:40]
        try:
            settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except ValueError as error:
            raise UnsupportedModel(f"transformers has no model of type {kind!r}") from error
        if getattr(settings, "is_encoder_decoder", False):
            raise _refused(settings, "an encoder with a decoder has no one vector of a text")
        classes = getattr(settings, "architectures", None) or ()
        self.scores = any(each.endswith("ForSequenceClassification") for each in classes)
        if self.scores and settings.num_labels != 1:
            raise _refused(settings, f"a classifier of {settings.num_labels} labels ranks nothing")
        self._device = choose_device(device)
        self._dtype = _dtype(dtype, self._device, settings)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if not self._tokenizer.is_fast:
            raise _refused(settings, "its tokenizer has no tokenizer.json")
        if self.scores and self._tokenizer.chat_template:
            raise _refused(settings, "it reads pairs through a chat template, which is not served")
        pad_id = self._tokenizer.pad_token_id
        self._pad_id = 0 if pad_id is None else int(pad_id)
        if self.scores:
            # Decoders find the last token by it.
            settings.pad_token_id = self._pad_id
        # Read twice, once for the digest, which also warms the page cache.
        bar = Bar(progress, 2 * sum(file.stat().st_size for file in weights))
        digest = model_digest(folder / "config.json", weights, read=bar.advance)
        self._network = _network(folder, settings, self.scores, self._dtype, bar)
        self._network.to(self._device)
        self._layers = _layers(folder, settings, self.scores, self._dtype, self._device)
        own = read_json(folder / "sentence_bert_config.json")
        self._lowers = bool(own.get("do_lower_case"))
        st = read_json(folder / "config_sentence_transformers.json")
        self._prompts: dict[str, str] = {} if self.scores else dict(st.get("prompts") or {})
        self._default_prompt = "" if self.scores else st.get("default_prompt_name") or ""
        self._activation = _score_activation(settings, st)
        self._accepted = set(self._tokenizer.model_input_names)
        self._special = self._tokenizer.num_special_tokens_to_add(pair=self.scores)
        longest = _longest(own, settings, self._tokenizer, self._network)
        self.size = 1
        self.size = len(self._run([Sequences((self._pad_id,) * 2)])[0])
        self.description = ModelDescription(
            name or folder.resolve().name,
            digest,
            longest,
            len(self._tokenizer),
            (),
            tokenizer_digest=tokenizer_digest(folder),
            task=ModelTask.SCORE if self.scores else ModelTask.EMBED,
            vector_size=0 if self.scores else self.size,
        )
        self._check_padding(settings)

    @property
    def max_tokens(self) -> int:
        return self.description.max_model_len

    def prompt(self, name: str) -> str:
        """The text that goes before each text. Raises InvalidArgument naming prompt_name."""
        wanted = name or self._default_prompt
        if not wanted:
            return ""
        if wanted not in self._prompts:
            known = ", ".join(sorted(self._prompts)) or "none"
            raise wrong("prompt_name", f"is no prompt of this model; it has: {known}")
        return self._prompts[wanted]

    def prompt_for(self, side: str) -> str:
        """The prompt of one side of a search, query or document, where the model has one."""
        return self._prompts.get(side, "")

    def tokenize(
        self, parts: Sequence[VectorInput], truncate_tokens: int | None
    ) -> list[Sequences | BatonError]:
        """An entry for each part. truncate_tokens: what exceeds so many, or the model's length, is
        dropped, -1: the latter alone; None: it is an error."""
        limit, cut = self.max_tokens, truncate_tokens is not None
        if truncate_tokens is not None and truncate_tokens >= 0:
            limit = min(limit, truncate_tokens)
        found: list[Sequences | BatonError] = []
        for part in parts:
            if isinstance(part, str | TextPair):
                texts = (part,) if isinstance(part, str) else (part.query, part.document)
                # The library keeps special tokens, so that there is room for no fewer.
                made = self._tokenizer(
                    *(text.lower() if self._lowers else text for text in texts),
                    truncation=cut,
                    max_length=max(limit, self._special + 1) if cut else None,
                    return_attention_mask=False,
                    verbose=False,
                )
                types = tuple(made.get("token_type_ids") or ())
                found.append(self._checked(Sequences(tuple(made["input_ids"]), types), limit))
            else:
                found.append(self._checked(Sequences(part[:limit] if cut else part), limit))
        return found

    def compute(
        self, inputs: Sequence[Sequences], max_batch_tokens: int
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yields batch after batch: the indexes of its inputs, and their float32 numbers [batch,
        size], on the host. max_batch_tokens: of a batch with its padding, unless one input alone
        has more."""
        for batch in batches([len(each.ids) for each in inputs], max_batch_tokens):
            yield batch, self._run([inputs[index] for index in batch])

    def shortened(self, vectors: torch.Tensor, dimensions: int) -> torch.Tensor:
        """The first numbers of vectors [batch, size], of length 1 again where the model's are."""
        short = vectors[:, :dimensions]
        return nn.functional.normalize(short, dim=-1) if self._layers.normalizes else short

    @torch.inference_mode()
    def _run(self, inputs: Sequence[Sequences]) -> torch.Tensor:
        """[batch, size] in float32 on the host."""
        longest = max(len(each.ids) for each in inputs)
        lengths = [len(each.ids) for each in inputs]
        rows = [[*each.ids, *[self._pad_id] * (longest - len(each.ids))] for each in inputs]
        mask = upload([[1] * n + [0] * (longest - n) for n in lengths], torch.int64, self._device)
        given = {"input_ids": upload(rows, torch.int64, self._device), "attention_mask": mask}
        if "token_type_ids" in self._accepted:
            types = [[*each.types, *[0] * (longest - len(each.types))] for each in inputs]
            given["token_type_ids"] = upload(types, torch.int64, self._device)
        if self.scores:
            logits = self._network(**given).logits
            return self._activation(logits.float()).cpu()
        states = self._network(**given).last_hidden_state
        pooled = [_pool(way, states, mask) for way in self._layers.poolings]
        vectors = torch.cat(pooled, dim=-1)
        for part in self._layers.parts:
            vectors = part(vectors)
        return vectors.float().cpu()

    def _checked(self, made: Sequences, limit: int) -> Sequences | BatonError:
        if not made.ids:
            return InvalidArgument("must not be empty", field="input")
        if len(made.ids) > limit:
            return ContextLengthExceeded(
                f"has {len(made.ids)} tokens, and may have {limit}", field="input"
            )
        if not 0 <= min(made.ids) <= max(made.ids) < self.description.vocab_size:
            return InvalidArgument("has a token that is not in the vocabulary", field="input")
        return made

    def _check_padding(self, settings: Any) -> None:
        """Raises UnsupportedModel for a model whose numbers depend on what is beside an input."""
        draw = random.Random(0)
        size = self.description.vocab_size
        lengths = [min(length, self.max_tokens) for length in (3, 7, 24)]
        inputs = [Sequences(tuple(draw.randrange(size) for _ in range(n))) for n in lengths]
        together = self._run(inputs)
        for index, each in enumerate(inputs):
            alone = self._run([each])[0]
            moved = (alone - together[index]).norm() / max(1e-6, float(alone.norm()))
            if not math.isfinite(moved) or moved > CHECKED:
                raise _refused(settings, "its numbers depend on what is computed beside an input")


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Groups of indexes of even lengths, longest first. max_tokens: of a group with its padding."""
    group: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        full = (len(group) + 1) * longest > max_tokens
        if group and (full or (lengths[index] < EVENNESS * longest and longest > _FEW)):
            yield group
            group = []
        if not group:
            longest = lengths[index]
        group.append(index)
    if group:
        yield group


def _is_pair(text: Any) -> bool:
    return len(text) == 2 and isinstance(text[0], str)


def _pool(way: str, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """states [batch, longest, size] of sequences that are padded on the right, and their mask
    [batch, longest] -> [batch, size]."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    match way:
        case "cls":
            return states[:, 0]
        case "max":
            return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
        case "lasttoken":
            last = mask.sum(dim=1) - 1
            return states[torch.arange(len(states), device=states.device), last]
        case "weightedmean":
            weights = weights * torch.arange(
                1, states.shape[1] + 1, device=states.device, dtype=states.dtype
            ).view(1, -1, 1)
    total = (states * weights).sum(dim=1)
    count = weights.sum(dim=1).clamp(min=1e-9)
    return total / (count.sqrt() if way == "mean_sqrt_len_tokens" else count)


def _network(folder: Path, settings: Any, scores: bool, dtype: torch.dtype, bar: Bar) -> Any:
    """The network in eval mode. Raises UnsupportedModel for a class that is not known, and for
    weights that are not those of the class."""
    loader = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModel
    try:
        with without_compiler(), quiet(bar):
            network, info = loader.from_pretrained(
                folder,
                config=settings,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except (ValueError, ImportError, RuntimeError) as error:
        raise _refused(settings, "transformers has no such model, or other weights") from error
    # A pooler's output is not used, and many checkpoints have none.
    missing = [name for name in info["missing_keys"] if scores or not name.startswith("pooler.")]
    if missing or info["mismatched_keys"]:
        lacking = ", ".join(sorted(missing)[:3]) or "weights of the configured sizes"
        raise _refused(settings, f"the checkpoint lacks {lacking}")
    network.config.use_cache = False
    return network.eval()


def _layers(
    folder: Path, settings: Any, scores: bool, dtype: torch.dtype, device: torch.device
) -> _Layers:
    """Reads modules.json. Raises UnsupportedModel for a module that is not known."""
    listed: Any = []
    if not scores and (folder / "modules.json").is_file():
        listed = read_json_list(folder / "modules.json")
    poolings: tuple[str, ...] = ("mean",)
    parts: list[nn.Module] = []
    normalizes = False
    for module in listed[1:]:
        kind = str(module.get("type", "")).rpartition(".")[2]
        part = folder / str(module.get("path", ""))
        if part.resolve() != folder.resolve() and folder.resolve() not in part.resolve().parents:
            raise _refused(settings, "modules.json names a folder outside of the model's")
        match kind:
            case "Pooling":
                poolings = _poolings(read_json(part / "config.json"), settings)
            case "Dense":
                parts.append(_dense(part, settings))
            case "Normalize":
                parts.append(_Normalize())
            case "Dropout":
                continue
            case _:
                raise _refused(settings, f"modules.json names {kind[:40]!r}, which is not served")
        normalizes = kind == "Normalize"
    stack = tuple(part.to(device, dtype).eval() for part in parts)
    return _Layers(poolings, stack, normalizes)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The objects of a file. Raises UnsupportedModel."""
    import json

    try:
        listed = json.loads(path.read_bytes())
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UnsupportedModel(f"{path.name} is not a list of modules")
    return listed


def _poolings(config: dict[str, Any], settings: Any) -> tuple[str, ...]:
    if config.get("include_prompt") is False:
        raise _refused(settings, "it leaves prompts out of its pooling, which is not served")
    mode = config.get("pooling_mode")
    named = [mode] if isinstance(mode, str) else mode
    if named is None:
        named = [way for key, way in _POOLINGS.items() if config.get(key)]
    if not named or set(named) - set(_POOLINGS.values()):
        raise _refused(settings, "its way to pool is not served")
    return tuple(named)


def _dense(folder: Path, settings: Any) -> nn.Module:
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None or not (folder / "model.safetensors").is_file():
        raise _refused(settings, f"the dense layer in {folder.name} is not served")
    layer = nn.Linear(
        int(config["in_features"]), int(config["out_features"]), bool(config.get("bias", True))
    )
    stored = load_file(folder / "model.safetensors")
    layer.load_state_dict({name.removeprefix("linear."): each for name, each in stored.items()})
    return _Dense(layer, activation)


def _score_activation(settings: Any, st: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of a cross-encoder's only logit, as `sentence-transformers` chooses it."""
    own = getattr(settings, "sentence_transformers", None) or {}
    name = (
        st.get("activation_fn")
        or own.get("activation_fn")
        or getattr(settings, "sbert_ce_default_activation_function", None)
        or "Sigmoid"
    )
    found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        raise _refused(settings, "its activation function is not served")
    return found


def _longest(own: dict[str, Any], settings: Any, tokenizer: Any, network: Any) -> int:
    """Tokens of the longest input."""
    text = settings.get_text_config()
    known = [int(tokenizer.model_max_length)]
    if own.get("max_seq_length"):
        known.append(int(own["max_seq_length"]))
    positions = getattr(text, "max_position_embeddings", None)
    if positions and positions > 0:
        padding = getattr(getattr(network, "embeddings", None), "padding_idx", None)
        offset = "roberta" in settings.model_type or settings.model_type == "camembert"
        known.append(int(positions) - (padding + 1 if offset and padding is not None else 0))
    return min(known)


def _dtype(name: str, device: torch.device, settings: Any) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    own: Any = getattr(settings.get_text_config(), "dtype", None)
    known: torch.dtype = own if own in DTYPES.values() else torch.float32
    return known if device.type == "cuda" else torch.float32


def _refused(settings: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{settings.model_type}: {why}")
