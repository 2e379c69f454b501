"""From a folder or hub id to a transformers model wired to our attention, or a readable refusal.

Knows files and model classes; KV memory and steps are the runner's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from baton.core.errors import InvalidArgument
from baton.core.request.model import ModelDescription
from baton.engine.attention import INTERFACE
from baton.engine.config import EngineConfig
from baton.engine.digest import fetched_digest, model_digest
from baton.engine.guards import UnsupportedModel, check_class, check_files, rope_limit
from baton.engine.int8 import check_int8
from baton.engine.progress import Bar, Progress, quiet
from baton.engine.wire import DTYPES

log = logging.getLogger(__name__)

Build = Callable[[Any, Path, Any, torch.dtype, Bar], nn.Module]
"""(model class, folder, its config, number type, progress) -> the network in eval mode."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """network: in eval mode, with its own eager attention still; `wire` switches it to ours.
    device: where it runs; without weights, see `outline`, where it would.
    """

    network: nn.Module
    description: ModelDescription
    device: torch.device


def load(
    config: EngineConfig, progress: Progress | None = None, build: Build | None = None
) -> LoadedModel:
    """Reads the model. Raises UnsupportedModel naming what is wrong with it.

    Weights are read twice, once for the digest (which also warms the page cache) and once into
    memory; progress counts both. build: what makes the network, where it is not the whole one.
    """
    folder = _folder(config.model, ["*.safetensors", "*.json", "*.jinja"])
    weights = check_files(folder)
    settings = _settings(folder)
    model_class = _model_class(settings)
    check_class(model_class, settings)
    device = choose_device(config.device)
    if config.quantize == "int8":
        check_int8(device)
    total = 2 * sum(file.stat().st_size for file in weights)
    bar = Bar(progress, total)
    digest = model_digest(folder / "config.json", weights, config.quantize, bar.advance)
    fetched = fetched_digest(folder)
    if fetched and fetched != digest.partition("-")[0]:
        raise UnsupportedModel(
            f"the weights in {folder.name} are not those that 'baton fetch' put there: delete the "
            "folder and fetch the model again"
        )
    dtype = _dtype(config.dtype, device, settings)
    network = (build or _network)(model_class, folder, settings, dtype, bar)
    return LoadedModel(
        network=network.to(device),
        description=ModelDescription(
            name=config.model_name or folder.name,
            digest=digest,
            max_model_len=_max_model_len(config.max_model_len, settings),
            vocab_size=int(settings.get_text_config().vocab_size),
            eos_token_ids=_eos_token_ids(network, settings),
            tokenizer_digest=config.tokenizer_digest,
        ),
        device=device,
    )


def outline(config: EngineConfig) -> LoadedModel:
    """The wired model without weights: shapes on torch's meta device, and an empty digest.

    Needs config.json alone, also of a hub id. Raises UnsupportedModel like `load`.
    """
    settings = _settings(_folder(config.model, ["config.json"]))
    check_class(_model_class(settings), settings)
    device = choose_device(config.device)
    if config.quantize == "int8" and device.type != "cpu":
        check_int8(device)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=_dtype(config.dtype, device, settings), attn_implementation="eager"
        )
    wire(network)
    if network._can_set_experts_implementation():
        # The only form whose shapes do not depend on which experts the tokens choose.
        network.set_experts_implementation("batched_mm")
    return LoadedModel(
        network=network.eval(),
        description=ModelDescription(
            name=config.model_name or Path(config.model).name,
            digest="",
            max_model_len=_max_model_len(config.max_model_len, settings),
            vocab_size=int(settings.get_text_config().vocab_size),
            eos_token_ids=(),
        ),
        device=device,
    )


def wire(network: nn.Module) -> None:
    """Routes all attention of the model through `attention.paged`.

    On CPUs, experts that `experts` does not know go through their loop: the batched forms make a
    token's bits depend on how many others chose its expert, and are no faster.
    """
    network.set_attn_implementation(INTERFACE)  # type: ignore[operator]
    if network.config._attn_implementation != INTERFACE:  # type: ignore[union-attr]
        raise UnsupportedModel("the model did not take our attention")
    on_cpu = next(network.parameters()).device.type == "cpu"
    if on_cpu and network._can_set_experts_implementation():  # type: ignore[operator]
        network.set_experts_implementation("eager")  # type: ignore[operator]


def run_network(
    network: nn.Module,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    context: object,
) -> torch.Tensor:
    """One forward pass: int64 token_ids and positions [1, T], rows [S] -> logits [S, vocab].

    context: what attention gets, or None for the model's own attention. All caches of transformers
    are bypassed; positions come only from `positions`.
    """
    extra = {} if context is None else {"baton_context": context}
    output = network(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        past_key_values=None,
        logits_to_keep=rows,
        **extra,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


def _folder(model: str, files: list[str]) -> Path:
    """The model's folder; a hub id's `files` are fetched."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise UnsupportedModel(f"model {path.name} is neither a folder nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UnsupportedModel(f"model {model} cannot be fetched from the hub") from error


def _settings(folder: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"model {folder.name} is of an architecture that transformers "
            f"{transformers.__version__} does not have, or needs code of its own"
        ) from error


def _model_class(settings: Any) -> Any:
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(settings) not in mapping:
        raise UnsupportedModel(f"{settings.model_type}: it is no causal language model")
    found = mapping[type(settings)]
    model_class: Any = found[0] if isinstance(found, (tuple, list)) else found
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel(f"{settings.model_type}: it cannot choose which logits to compute")
    return model_class


def _network(
    model_class: Any, folder: Path, settings: Any, dtype: torch.dtype, bar: Bar
) -> nn.Module:
    with quiet(bar):
        network, info = model_class.from_pretrained(
            folder,
            config=settings,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
        )
    lacking = [*info["missing_keys"], *info["mismatched_keys"]]
    if lacking:
        raise UnsupportedModel(f"model {folder.name} lacks weights, among them {lacking[0]}")
    eval_mode: nn.Module = network.eval().requires_grad_(False)
    return eval_mode


def choose_device(name: str) -> torch.device:
    """The device of a configured name; auto is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(name: str, device: torch.device, settings: Any) -> torch.dtype:
    """Raises InvalidArgument for one that this GPU does not compute in."""
    gpu = device.type == "cuda" and torch.cuda.is_available()
    if gpu and name == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InvalidArgument("this GPU does not compute in bfloat16", field="dtype")
    if name != "auto":
        return DTYPES[name]
    own = getattr(settings.get_text_config(), "dtype", None)
    if device.type == "cuda" and isinstance(own, torch.dtype) and own in DTYPES.values():
        return own
    return torch.float32


def _max_model_len(wanted: int, settings: Any) -> int:
    limit = int(settings.get_text_config().max_position_embeddings)
    fixed = rope_limit(settings)
    if wanted > limit:
        raise UnsupportedModel(f"max_model_len {wanted} is more than the model's {limit}")
    if fixed is None or (wanted or limit) <= fixed:
        return wanted or limit
    if wanted:
        raise UnsupportedModel(
            f"max_model_len {wanted} is more than {fixed}, beyond which this model's rotary "
            "embedding depends on the longest sequence of a batch"
        )
    log.warning("max_model_len is %d: beyond it the rotary embedding varies by batch", fixed)
    return fixed


def _eos_token_ids(network: nn.Module, settings: Any) -> tuple[int, ...]:
    generation = getattr(network, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = settings.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
