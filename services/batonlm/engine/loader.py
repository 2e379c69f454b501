"""From a folder or hub id to a transformers model wired to our attention, or a readable refusal.

Files, configurations and model classes are refused by name, before serving, where a model would
load but answer wrongly: each of these checks stands for a failure that was seen to be silent. What
only running a model shows is checked by `selfcheck`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from batonlm.core.errors import BatonError, Internal, InvalidArgument
from batonlm.core.request.model import KV_DTYPES, SCALED, KvLayout, ModelDescription
from batonlm.engine.attention.interface import INTERFACE, ForwardPass, LayerArguments, paged
from batonlm.engine.attention.own import OwnAttention, cache_layers, keeps_states, probe_own
from batonlm.engine.checkpoint import (
    Checkpoint,
    Numbers,
    Quantised,
    Scheme,
    Slice,
    UnsupportedModel,
    check_files,
    read_scheme,
)
from batonlm.engine.config import EngineConfig
from batonlm.engine.device import choose_device
from batonlm.engine.fused.decoder import Decoder
from batonlm.engine.heads.load import make_head, read_head
from batonlm.engine.kept import KeptLinear, KeptStack, KeptWeight, NotKept, kept_in, stacks_of
from batonlm.engine.kv.cache import DTYPES
from batonlm.engine.latent import keep_latents, keeps_latents
from batonlm.engine.lean import transformers, transformers_logging, without_compiler
from batonlm.engine.linear import are_known_experts
from batonlm.engine.memory import size
from batonlm.engine.quantized import settle
from batonlm.registry.cache import differing
from batonlm.registry.digest import fetched_digest, model_digest
from batonlm.registry.sources import hub_folder

log = logging.getLogger(__name__)

_NO_LIMIT = 2048
"""Positions of a model whose configuration names none, where none are asked for."""

_KEPT_WIDE = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
"""Where a class names the modules that transformers keeps in float32, by the type of the others."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Unservable(UnsupportedModel):
    """A model that would be wrong in whatever way its attention is computed."""


def why_own(model_class: Any, config: Any) -> str:
    """Why attention of this architecture cannot be replaced, so that it has to attend by itself;
    "" where its configuration tells of no reason."""
    name = config.model_type
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        return f"{name}: it cannot choose which logits to compute"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{name}: its attention cannot be replaced (no attention backend support)"
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"{name}: it has layers of type {', '.join(sorted(others))}"
    if getattr(model_class, "_is_stateful", False) or keeps_states(config):
        return f"{name}: its layers keep a state of the sequence"
    return ""


def rope_limit(config: Any) -> int | None:
    """Positions up to which rotary frequencies are fixed, or None when they always are.

    With rope types dynamic and longrope the frequencies depend on the longest sequence of a batch:
    below the original length they are constant, beyond it one sequence would change all others.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    limits = [
        int(entry.get("original_max_position_embeddings") or text.max_position_embeddings)
        for entry in entries
        if "dynamic" in entry.get("rope_type", "") or entry.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def index_limit(config: Any) -> int | None:
    """Positions up to which layers that choose what they attend to by an index attend to all, or
    None for models without such layers. Beyond, the last bits of scores would choose.

    Raises UnsupportedModel where the configuration does not tell.
    """
    text = config.get_text_config()
    if "indexed_attention" not in (getattr(text, "layer_types", None) or ()):
        return None
    chosen = getattr(text, "index_topk", None)
    if chosen is None:
        raise UnsupportedModel(f"{config.model_type}: its index of positions is not known here")
    return int(chosen)


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are read."""


class Bar:
    """Reports how far loading has come: turns steps of any size into (done, total) calls that never
    go backwards."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress = progress
        self._done = 0
        self.total = total

    def advance(self, count: int) -> None:
        self._done = min(self._done + count, self.total)
        if self._progress is not None:
            self._progress(self._done, self.total)


def _counted(items: list[Any], bar: Bar) -> Iterator[Any]:
    """What transformers' own progress bar does, which counts tensors."""
    for item in items:
        yield item
        bar.advance(bar.total // 2 // len(items))
    bar.advance(bar.total)


@contextmanager
def quiet(bar: Bar) -> Iterator[None]:
    """Transformers' bar drives ours, and its advice to Python users is not printed."""

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        items = args[0] if args else kwargs.get("iterable")
        return factory(*args, **kwargs) if items is None else _counted(list(items), bar)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
        transformers_logging.set_verbosity(verbosity)


Build = Callable[[Any, Checkpoint, Any, torch.dtype, Bar], nn.Module]
"""(model class, files, their config, number type, progress) -> the network in eval mode."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    network: nn.Module
    """In eval mode, with its own eager attention still; `wire` switches it to ours."""
    description: ModelDescription
    device: torch.device
    """Where it runs; without weights, see `outline`, where it would."""
    settings: Any
    """The configuration of the whole model, whatever part of it the network is."""
    quantize: str = "none"
    """What linear layers are to become, as `quantized.settle` returns it."""
    own_because: str = ""
    """Why the model has to attend by itself, see `attention.own`; "" when it need not."""
    whole: bool = True
    """Whether the network is all of the model, and not a rank's part."""
    head: Any = None
    """The model's own head where one is configured, see `heads`. It shares the network's embedding
    and product into logits."""


@without_compiler()
def load(
    config: EngineConfig,
    progress: Progress | None = None,
    build: Build | None = None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Reads the model. Raises UnsupportedModel naming what is wrong with it.

    Weights are read twice, once for the digest (which also warms the page cache) and once into
    memory; progress counts both. build: what makes the network, where it is not the whole one.
    device: None is the configured one.
    """
    folder = _folder(config.model, ["*.safetensors", "*.json", "*.jinja"])
    weights = check_files(folder)
    settings, scheme = _settings(folder)
    model_class = _model_class(settings)
    because = why_own(model_class, settings)
    if because and build is not None:
        raise UnsupportedModel(f"{because}: it runs on one rank only")
    if config.heads and build is not None:
        raise InvalidArgument("heads draft on one rank only", field="heads")
    device = device or choose_device(config.device)
    dtype = _dtype(config.dtype, device, settings)
    quantize = settle(config.quantize, device, dtype)
    checkpoint = Checkpoint(folder, tuple(weights), scheme)
    with checkpoint.open(dtype):
        # What is no weight of the scheme is refused here.
        pass
    total = 2 * sum(file.stat().st_size for file in weights)
    bar = Bar(progress, total)
    digest = model_digest(folder / "config.json", weights, quantize, bar.advance)
    fetched = fetched_digest(folder)
    if fetched and fetched != digest.partition("-")[0]:
        raise UnsupportedModel(
            f"the weights in {folder.name} are not those that 'baton fetch' put there "
            f"({differing(folder)}): delete the folder and fetch the model again"
        )
    network = None
    keep = not because and _keeps(scheme, device, quantize)
    if build is None and (device.type == "cuda" or keep):
        network = read_onto(device, model_class, checkpoint, settings, dtype, bar, keep=keep)
    if network is None:
        network = (build or _network)(model_class, checkpoint, settings, dtype, bar)
    if scheme is not None:
        log.info("checkpoint quantised by %s: %s", scheme.method, _said(network))
    network = network.to(device)
    head = None
    if config.heads:
        with quiet(Bar(None, 0)), checkpoint.open(dtype) as stored:
            head = read_head(network, settings, stored, device)
    return LoadedModel(
        network=network,
        description=_description(
            config, settings, folder.name, digest, _eos_token_ids(network, settings)
        ),
        device=device,
        settings=settings,
        quantize=quantize,
        own_because=because,
        whole=build is None,
        head=head,
    )


Cutting = Callable[[nn.Module, Any], None]
"""Leaves a part of a network without memory, given the whole one's settings."""


@without_compiler()
def outline(config: EngineConfig, cut: Cutting | None = None) -> LoadedModel:
    """The wired model without weights: shapes on torch's meta device, and an empty digest.

    Needs config.json alone, also of a hub id; then weights that would stay quantised count as if
    they were not, because only the headers of weight files tell them. cut: what makes it a rank's
    part. Raises UnsupportedModel like `load`, and what `cut` raises.
    """
    folder = _folder(config.model, ["config.json"])
    settings, scheme = _settings(folder)
    model_class = _model_class(settings)
    because = why_own(model_class, settings)
    if because and cut is not None:
        raise UnsupportedModel(f"{because}: it runs on one rank only")
    device = choose_device(config.device)
    dtype = _dtype(config.dtype, device, settings)
    quantize = settle(config.quantize, device, dtype)
    network = _made(copy.deepcopy(settings), dtype)
    if cut is not None:
        with torch.device("meta"):
            cut(network, settings)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if cut is None and not because and files and _keeps(scheme, device, quantize):
        with Checkpoint(folder, files, scheme).open(dtype, shapes=True) as stored:
            if _readable(model_class, network, stored, dtype):
                _keep(network, stored, dtype)
    head = make_head(network, settings) if config.heads else None
    if not because:
        wire(network)
    if network._can_set_experts_implementation():
        # The only form whose shapes do not depend on which experts the tokens choose.
        network.set_experts_implementation("batched_mm")
    return LoadedModel(
        network=network.eval(),
        description=_description(config, settings, Path(config.model).name),
        device=device,
        settings=settings,
        quantize=quantize,
        own_because=because,
        whole=cut is None,
        head=head,
    )


def _description(
    config: EngineConfig, settings: Any, name: str, digest: str = "", eos: tuple[int, ...] = ()
) -> ModelDescription:
    return ModelDescription(
        name=config.model_name or name,
        digest=digest,
        max_model_len=_max_model_len(config.max_model_len, settings),
        vocab_size=int(settings.get_text_config().vocab_size),
        eos_token_ids=eos,
        tokenizer_digest=config.tokenizer_digest,
    )


def wire(network: nn.Module) -> None:
    """Routes all attention of the model through `attention.interface.paged`, and has layers of
    latent attention keep latents.

    On CPUs, experts that `linear` cannot pack go through their loop: the batched forms make a
    token's bits depend on how many others chose its expert, and are no faster.
    """
    transformers.AttentionInterface.register(INTERFACE, paged)
    network.set_attn_implementation(INTERFACE)  # type: ignore[operator]
    if network.config._attn_implementation != INTERFACE:  # type: ignore[union-attr]
        raise UnsupportedModel("the model did not take our attention")
    keep_latents(network)
    on_cpu = next(network.parameters()).device.type == "cpu"
    if on_cpu and network._can_set_experts_implementation():  # type: ignore[operator]
        network.set_experts_implementation("eager")  # type: ignore[operator]


def run_network(network: nn.Module, inputs: ForwardPass) -> torch.Tensor:
    """One forward pass: logits [S, vocab] of the sampled rows.

    All caches of transformers are bypassed; positions come only from the inputs.
    """
    if isinstance(network, Decoder):
        decoded: torch.Tensor = network(inputs)
        return decoded
    extra = {} if inputs.context is None else {"baton_context": inputs.context}
    output = network(
        input_ids=inputs.token_ids,
        position_ids=inputs.positions,
        use_cache=False,
        logits_to_keep=inputs.sampled,
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
    try:
        return hub_folder(model, files)
    except BatonError as error:
        raise UnsupportedModel(error.message) from error


def _settings(folder: Path) -> tuple[Any, Scheme | None]:
    """The configuration, without what it says of quantised weights, and that."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (StrictDataclassError, ArithmeticError, TypeError) as error:
        raise UnsupportedModel(
            f"the config.json of {folder.name} has values that transformers "
            f"{transformers.__version__} refuses"
        ) from error
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"model {folder.name} is of an architecture that transformers "
            f"{transformers.__version__} does not have, or needs code of its own"
        ) from error
    try:
        settings.get_text_config()
    except ValueError as error:
        raise UnsupportedModel(
            f"{settings.model_type}: several of its parts are models of text"
        ) from error
    return settings, read_scheme(settings)


def _model_class(settings: Any) -> Any:
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(settings) not in mapping:
        raise UnsupportedModel(f"{settings.model_type}: it is no causal language model")
    found = mapping[type(settings)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _made(settings: Any, dtype: torch.dtype) -> Any:
    """The network without weights, on torch's meta device. Raises UnsupportedModel for what
    transformers cannot make, in whatever way it fails."""
    name = settings.model_type
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=dtype, attn_implementation="eager"
            )
    except ImportError as error:
        raise UnsupportedModel(
            f"{name}: transformers makes it with a package only that is not installed"
        ) from error
    except Exception as error:
        raise UnsupportedModel(
            f"{name}: transformers {transformers.__version__} cannot make a causal language model "
            "of its configuration"
        ) from error


def _network(
    model_class: Any, checkpoint: Checkpoint, settings: Any, dtype: torch.dtype, bar: Bar
) -> nn.Module:
    """Read by transformers, which knows how files of other makers name weights."""
    given = {"config": settings, "dtype": dtype, "attn_implementation": "eager"}
    with quiet(bar), ExitStack() as ends:
        source: Path | None = checkpoint.folder
        if checkpoint.scheme is not None:
            source, given["state_dict"] = None, ends.enter_context(checkpoint.open(dtype))
        try:
            network, info = model_class.from_pretrained(
                source, use_safetensors=True, output_loading_info=True, **given
            )
        except Exception:
            _made(copy.deepcopy(settings), dtype)  # Where it is the configuration's fault, says so.
            raise
    lacking = [*info["missing_keys"], *info["mismatched_keys"]]
    if lacking:
        name = checkpoint.folder.name
        raise UnsupportedModel(f"model {name} lacks weights, among them {lacking[0]}")
    if source is None:
        add_generation(network, checkpoint.folder)
    eval_mode: nn.Module = network.eval().requires_grad_(False)
    return eval_mode


def add_generation(network: Any, folder: Path) -> None:
    """Gives a network that was not read by name what its folder says of ends of sequences."""
    if (folder / "generation_config.json").is_file():
        network.generation_config = transformers.GenerationConfig.from_pretrained(folder)


@torch.no_grad()
def read_onto(
    device: torch.device,
    model_class: Any,
    checkpoint: Checkpoint,
    settings: Any,
    dtype: torch.dtype,
    bar: Bar,
    *,
    keep: bool = False,
) -> nn.Module | None:
    """The network in a device's memory, read weight by weight: the host never holds all of it.

    keep: quantised weights stay so where that can be, see `kept`. None
    where only transformers can read it: where files name or shape weights otherwise, where some
    weights keep a type of their own, or buffers are not all made from the configuration.
    """
    network = _made(settings, dtype)
    with checkpoint.open(dtype) as stored:
        if not _readable(model_class, network, stored, dtype):
            return None
        if keep:
            _keep(network, stored, dtype, bar)
        if any(stacks_of(module) for module in network.modules()):
            # The other forms compute with all experts at once, from a tensor.
            network.set_experts_implementation("eager")
        network.to_empty(device=device)
        network.tie_weights()
        if compute_buffers(network) is not None:
            return None
        for name, weight in network.state_dict(keep_vars=True).items():
            if name not in stored:
                continue
            weight.copy_(stored[name][...])
            bar.advance(weight.nbytes)
    bar.advance(bar.total)
    add_generation(network, checkpoint.folder)
    eval_mode: nn.Module = network.eval().requires_grad_(False)
    return eval_mode


def _readable(
    model_class: Any, network: Any, stored: Mapping[str, Slice], dtype: torch.dtype
) -> bool:
    """Whether files have all weights of a network by its own names and shapes, and all of them are
    to be of the dtype."""
    if any(getattr(model_class, name, None) for name in _KEPT_WIDE.get(dtype, ())):
        return False
    network.tie_weights()
    wanted = network.state_dict(keep_vars=True)
    tied = {id(weight) for name, weight in wanted.items() if name in stored}
    return all(
        stored[name].get_shape() == list(weight.shape) if name in stored else id(weight) in tied
        for name, weight in wanted.items()
    )


_Kept = TypeVar("_Kept", KeptWeight, KeptStack)


def _keeps(scheme: Scheme | None, device: torch.device, quantize: str) -> bool:
    """Whether weights of a quantised checkpoint stay as they are where they can: on CPUs, unless
    they are to be rounded to other numbers. int8 takes codes of 8 bits as they are."""
    return scheme is not None and device.type == "cpu" and quantize in ("none", "int8")


def _keep(
    network: nn.Module, stored: Mapping[str, Slice], dtype: torch.dtype, bar: Bar | None = None
) -> None:
    """Has linear layers and experts keep quantised weights; others are left as they are, to be
    dequantised."""
    because: Counter[str] = Counter()

    def kept(name: str, make: Callable[[Numbers], _Kept]) -> _Kept | None:
        part = stored.get(name.lstrip("."))
        if not isinstance(part, Quantised):
            return None
        try:
            found = part.read(make)
        except NotKept as error:
            because[str(error)] += 1
            return None
        if bar is not None:
            bar.advance(found.num_bytes)
        return found

    for prefix, parent in list(network.named_modules()):
        if are_known_experts(parent):
            for name, parameter in list(parent.named_parameters(recurse=False)):
                if parameter.dim() != 3:
                    continue  # a bias
                stack = kept(f"{prefix}.{name}", lambda numbers: KeptStack.of(numbers, dtype))
                if stack is not None:
                    delattr(parent, name)
                    setattr(parent, name, stack)
            continue
        for name, child in list(parent.named_children()):
            whole = f"{prefix}.{name}.weight"
            if type(child) is nn.Linear and not hasattr(parent, "expand_kv"):
                weight = kept(whole, lambda numbers: KeptWeight.of(numbers, dtype))
                if weight is not None:
                    setattr(parent, name, KeptLinear(weight, child.bias))
            elif isinstance(stored.get(whole.lstrip(".")), Quantised):
                because["only plain linear layers and experts are kept"] += 1
    for reason, count in because.items():
        log.info("%d quantised weights are dequantised: %s", count, reason)


def _said(network: nn.Module) -> str:
    """What has become of quantised weights, for one line at load."""
    kept = kept_in(network)
    if not kept:
        return "dequantised while it is read"
    kinds = Counter(each.kind for each in kept)
    names = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{size(sum(each.num_bytes for each in kept))} of weights as stored ({names})"


def compute_buffers(network: nn.Module) -> str | None:
    """Fills the buffers that are in no file, such as rotary frequencies, as the model itself makes
    them. Returns the name of a module that does not make all of its own; None when all are made."""
    stored = network.state_dict().keys()
    for prefix, module in network.named_modules():
        names = [name for name, _ in module.named_buffers(prefix, recurse=False)]
        own = [network.get_buffer(name) for name in names if name not in stored]
        if not own:
            continue
        if not all(buffer.is_floating_point() for buffer in own):
            return str(prefix)
        for buffer in own:
            buffer.fill_(torch.nan)
        network._init_weights(module)  # type: ignore[operator]
        if any(bool(buffer.isnan().any()) for buffer in own):
            return str(prefix)
    return None


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
    # Where distances bias scores, or a state takes the place of a past, a model has no last one.
    text = settings.get_text_config()
    named = int(getattr(text, "max_position_embeddings", None) or 0)
    limit = named if named > 0 else max(wanted, _NO_LIMIT)
    fixed = rope_limit(settings)
    if (indexed := index_limit(settings)) is not None and indexed < limit:
        limit = indexed
        log.warning("max_model_len is at most %d: beyond it an index chooses positions", indexed)
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
        found = getattr(settings.get_text_config(), "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of a model looks like."""

    layout: KvLayout
    dtype: str
    """The model's own number type, of queries and of keys and values as they are computed."""
    kept: str
    """The type that KV is kept in, a name of core's DTYPE_BYTES."""
    per_head: int
    """Query heads per KV head."""
    softcap: bool
    """Whether some layer has a soft cap."""
    sliding_layers: int = 0
    """How many look back over a window only."""
    layers: tuple[LayerArguments, ...] = ()
    """What each layer's attention is called with, in order."""
    latent_size: int = 0
    """How much of a key is a latent, which is its value too; 0 where the layout has values."""
    own: OwnAttention | None = None
    """Of a model that attends by itself; then the layout is of one layer and head, whose key is all
    that a position keeps."""

    @property
    def value_size(self) -> int:
        """Of the values that attention reads."""
        return self.latent_size or self.layout.value_size


@without_compiler()
def attach(
    loaded: LoadedModel, wire_dtype: str = "auto", cache_dtype: str = "auto"
) -> AttentionShape:
    """Has a model's attention run over our block pool: in our kernels, or, where they cannot take
    its place, by its own code. Raises UnsupportedModel, and InvalidArgument naming the field that
    has to change.

    wire_dtype, cache_dtype: see `probe_attention`.
    """
    because, network = loaded.own_because, loaded.network
    if not because:
        try:
            wire(network)
            return probe_attention(loaded, wire_dtype, cache_dtype)
        except Unservable:
            raise
        except UnsupportedModel as error:
            if not loaded.whole or keeps_latents(network):
                raise
            because = error.message
            network.set_attn_implementation("eager")  # type: ignore[operator]
    shape = _own_shape(loaded, wire_dtype, cache_dtype)
    log.warning("%s: it attends by itself, one sequence after the other", because)
    return shape


def _check_windows(name: str, network: Any, calls: list[LayerArguments]) -> None:
    """Raises Unservable where a layer's mask and its cache in transformers see different windows:
    then what transformers generates is not what its forward pass computes, beyond the window."""
    kept = [getattr(layer, "sliding_window", None) for layer in cache_layers(network.config)]
    for call in calls:
        if call.layer < len(kept) and call.window != kept[call.layer]:
            raise Unservable(
                f"{name}: layer {call.layer} attends to {call.window or 'all'} positions and "
                f"keeps {kept[call.layer] or 'all'}, so that transformers' own answers vary"
            )
        if call.window == 1:
            raise Unservable(f"{name}: windows of one position are not kept right by transformers")


def _own_shape(loaded: LoadedModel, wire_dtype: str, cache_dtype: str) -> AttentionShape:
    for field, value, wanted in (
        ("kv_cache_dtype", cache_dtype, "auto"),
        ("quantize", loaded.quantize, "none"),
    ):
        if value != wanted:
            raise InvalidArgument(
                f"a model that attends by itself is served with {wanted} only", field=field
            )
    network: Any = loaded.network
    if network._supports_sdpa:
        # Without it, scores of a chunk with the whole sequence lie in memory.
        network.set_attn_implementation("sdpa")
    own = probe_own(network)
    dtype = next(k for k, v in DTYPES.items() if v == loaded.network.dtype)
    layout = KvLayout(
        model_digest=loaded.description.digest,
        dtype=KV_DTYPES.get(wire_dtype, dtype),
        num_layers=1,
        num_kv_heads=1,
        key_size=own.width,
        value_size=0,
        state_positions=own.state_positions,
    )
    if layout.dtype in SCALED:
        raise InvalidArgument(
            "KV of a model that attends by itself has no scales", field="kv_wire_dtype"
        )
    if own.states and layout.dtype != dtype:
        raise InvalidArgument(
            "states of a sequence are handed over as they are: leave it at auto",
            field="kv_wire_dtype",
        )
    if own.stepwise:
        log.warning(
            "%s: it takes up a state only position by position, so that a prompt goes on slowly "
            "behind its first chunk",
            network.config.model_type,
        )
    layers = network.config.get_text_config().per_layer_config
    heads = max(int(getattr(layer, "num_attention_heads", 1)) for layer in layers)
    return AttentionShape(layout, dtype, dtype, heads, softcap=False, own=own)


@without_compiler()
def probe_attention(
    loaded: LoadedModel, wire_dtype: str = "auto", cache_dtype: str = "auto"
) -> AttentionShape:
    """The shape of attention and KV, taken from a run of the wired model, not its configuration.

    wire_dtype: of KV on the wire; auto is the type that it is kept in. cache_dtype: of KV in the
    pool; auto is the model's.
    Raises UnsupportedModel unless attention is called exactly once for each layer, with all it
    needs, and InvalidArgument naming kv_cache_dtype for latents in one byte a number.
    """
    network = loaded.network
    name = network.config.model_type  # type: ignore[union-attr]
    calls: list[LayerArguments] = []
    shapes: set[tuple[int, int, int, int]] = set()

    def note(
        arguments: LayerArguments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        calls.append(arguments)
        shapes.add((query.shape[0], key.shape[0], key.shape[-1], value.shape[-1]))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])

    device = next(network.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    try:
        run_network(network, ForwardPass(tokens, positions, tokens[0, :1], note))
    except Internal as error:
        raise UnsupportedModel(f"{name}: {error.message}") from error
    layers = int(network.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr,operator]
    if sorted(call.layer for call in calls) != list(range(layers)):
        raise UnsupportedModel(f"{name}: attention was called for {len(calls)} of {layers} layers")
    if len(shapes) != 1:
        raise UnsupportedModel(f"{name}: its layers have KV of different shapes")
    _check_windows(str(name), network, calls)
    ((query_heads, heads, key_size, value_size),) = shapes
    latent_size = value_size if calls[0].latent else 0
    dtype = next(k for k, v in DTYPES.items() if v == network.dtype)
    kept = KV_DTYPES.get(cache_dtype, dtype)
    if latent_size and kept in SCALED:
        raise InvalidArgument(
            f"{name}: its latents are not kept in {cache_dtype}; leave kv_cache_dtype at auto",
            field="kv_cache_dtype",
        )
    layout = KvLayout(
        model_digest=loaded.description.digest,
        dtype=KV_DTYPES.get(wire_dtype, kept),
        num_layers=layers,
        num_kv_heads=heads,
        key_size=key_size,
        value_size=0 if latent_size else value_size,
    )
    softcap = any(call.softcap is not None for call in calls)
    sliding = sum(call.window is not None for call in calls)
    in_order = tuple(sorted(calls, key=lambda call: call.layer))
    per_head = query_heads // heads
    return AttentionShape(layout, dtype, kept, per_head, softcap, sliding, in_order, latent_size)
