"""`baton plan`: shows what a deployment would need, before it runs; implements `memory` itself."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from baton_loadtest.planner.command import GIB, add_fleet_parser
from baton_loadtest.planner.split import add_split_parser
from batonlm.cli.layout import resolve_model
from batonlm.cli.precision import INT8_PRODUCTS, cpu_flags
from batonlm.core.errors import InvalidArgument, install
from batonlm.core.request.model import KV_DTYPES, KvLayout
from batonlm.engine.config import CHOICES, EngineConfig, configure_threads
from batonlm.engine.config_shape import shape_of
from batonlm.engine.memory import MemoryPlan, host_free_bytes, plan_memory, size
from batonlm.registry.sources import hub_folder, may_be_hub_id
from batonlm.rpc.model_folder import read_json
from batonlm.worker.hardware import sizes, usable_gpus

_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULTS = EngineConfig("any", kv_memory_bytes=0)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan")
    kinds = parser.add_subparsers(dest="plan", metavar="WHAT", required=True)
    memory = kinds.add_parser(
        "memory", help="where a worker's memory goes, from the model's config.json alone"
    )
    memory.add_argument("--model", default="", help="folder or hub id (default: the bundled model)")
    memory.add_argument(
        "--memory-gib", type=float, metavar="G",
        help="free memory of the device, of ranks each of theirs (default: what is free here)",
    )  # fmt: skip
    memory.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks that share each layer (default %(default)s)",
    )  # fmt: skip
    memory.add_argument(
        "--pipeline-parallel", type=int, default=1, metavar="N",
        help="stages of consecutive layers, of as many ranks each (default %(default)s)",
    )  # fmt: skip
    memory.add_argument(
        "--role", choices=("prefill", "decode"), default="decode",
        help="whose defaults to plan with (default %(default)s)",
    )  # fmt: skip
    memory.add_argument(
        "--memory-share", type=float, metavar="S",
        help="of it, what the worker may take (default: as the worker, by its device)",
    )  # fmt: skip
    memory.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    memory.add_argument(
        "--dtype", choices=("auto", *_DTYPES), default="auto",
        help="of weights and KV (auto: float32 on a CPU, the model's own on a GPU)",
    )  # fmt: skip
    memory.add_argument("--quantize", choices=CHOICES["quantize"], default="none")
    memory.add_argument(
        "--kv-cache-dtype", choices=CHOICES["kv_cache_dtype"], default="auto",
        help="of KV in the pool (auto: --dtype)",
    )  # fmt: skip
    memory.add_argument(
        "--context", type=int, default=0, metavar="N",
        help="positions of the longest sequence (default: the model's)",
    )  # fmt: skip
    memory.add_argument(
        "--sequences", type=int, metavar="N",
        help="at once (default: as the worker, by its device)",
    )  # fmt: skip
    memory.add_argument(
        "--step-tokens", type=int, metavar="N",
        help="most prompt tokens of a step (default: as the worker, by its device and the model)",
    )  # fmt: skip
    memory.add_argument(
        "--block-size", type=int, default=_DEFAULTS.block_size, metavar="N",
        help="positions of a block (default %(default)s)",
    )  # fmt: skip
    memory.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    add_fleet_parser(kinds)
    add_split_parser(kinds)


def run(args: argparse.Namespace) -> int:
    modules = {"fleet": "command", "split": "split"}
    if args.plan in modules:
        return int(import_module(f"baton_loadtest.planner.{modules[args.plan]}").run(args))
    return _memory(args)


def _memory(args: argparse.Namespace) -> int:
    if args.memory_gib is not None and args.memory_gib <= 0:
        raise InvalidArgument("must be more than 0", field="memory_gib")
    tensor, stages = args.tensor_parallel, args.pipeline_parallel
    for field in ("tensor_parallel", "pipeline_parallel"):
        if getattr(args, field) < 1:
            raise InvalidArgument("must be at least 1", field=field)
    config = EngineConfig(
        model=args.model or str(resolve_model("")[0]),
        dtype=args.dtype,
        device=args.device,
        block_size=args.block_size,
        kv_memory_bytes=0,
        max_model_len=args.context,
        quantize=args.quantize,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    found = (None if tensor * stages > 1 else _quickly(args, config)) or _slowly(args, config)
    return _show(args, found)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What a worker, or the rank with the least room, would take."""

    name: str
    layout: KvLayout
    dtype: str
    """In which the model computes."""
    latent_size: int
    sliding_layers: int
    memory: MemoryPlan
    config: EngineConfig
    """With what the options left open."""
    weights: int
    """Bytes of all ranks."""


def _sized(
    args: argparse.Namespace, config: EngineConfig, gpu_bytes: int | None, weights: int
) -> EngineConfig:
    """The configuration with what a worker's role, device and model decide."""
    found = sizes(args.role, gpu_bytes, weights)
    sequences = found.max_running if args.sequences is None else args.sequences
    tokens = found.step_tokens if args.step_tokens is None else args.step_tokens
    share = found.memory_share if args.memory_share is None else args.memory_share
    return replace(
        config, memory_share=share, max_batch=sequences, max_step_tokens=tokens + sequences
    )


def _quickly(args: argparse.Namespace, config: EngineConfig) -> _Outlook | None:
    """Of a model that `config_shape` knows; None for others, and for what only torch can tell: how
    much of a GPU is free, and in what it computes."""
    on_gpu = config.device == "cuda"
    if config.device != "cpu" and usable_gpus("auto"):
        return None
    if config.quantize == "fp8" or (on_gpu and (not args.memory_gib or config.quantize != "none")):
        return None
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        if not may_be_hub_id(config.model):
            return None
        folder = hub_folder(config.model, ["config.json"])
    shape = shape_of(read_json(folder / "config.json"))
    if shape is None or config.max_model_len > shape.positions:
        return None
    dtype = config.dtype
    if dtype == "auto":
        dtype = shape.dtype if on_gpu and shape.dtype in _DTYPES else "float32"
    quantize = config.quantize
    if quantize == "int8" and cpu_flags().isdisjoint(INT8_PRODUCTS):
        quantize = "int8-weights"
    free = int((args.memory_gib or 0) * GIB) or host_free_bytes()
    weights = shape.weights_bytes(dtype, quantize, on_cpu=not on_gpu)
    config = _sized(args, config, free if on_gpu else None, weights)
    kept = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    memory = plan_memory(
        config,
        device="cuda" if on_gpu else "cpu",
        model_len=config.max_model_len or shape.positions,
        free_bytes=free,
        weights=weights,
        activations=shape.activation_bytes(config, dtype),
        position=shape.position_bytes(kept),
    )
    layout = KvLayout(
        model_digest="",
        dtype=kept,
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        key_size=shape.head_size,
        value_size=shape.head_size,
    )
    name = config.model_name or Path(config.model).name
    return _Outlook(name, layout, dtype, 0, shape.sliding_layers, memory, config, weights)


def _slowly(args: argparse.Namespace, config: EngineConfig) -> _Outlook:
    """By building the model without its weights, which is to import torch."""
    tensor, stages = args.tensor_parallel, args.pipeline_parallel
    if "torch" not in sys.modules:
        configure_threads()
    try:
        from batonlm.engine.device import choose_device
        from batonlm.engine.footprint import foresee, free_bytes, total_bytes, weights_bytes
        from batonlm.engine.loader import outline
        from batonlm.engine.ranks.runner import Place
        from batonlm.engine.ranks.shards import cutting
    except ImportError as error:
        raise InvalidArgument(f"planning needs the engine: {install('engine')}") from error
    device = choose_device(config.device)
    on_gpu = device.type == "cuda"
    free, total = int((args.memory_gib or 0) * GIB), None
    if not free:
        free, total = free_bytes(device), total_bytes(device)
    ranks = tensor * stages
    # All ranks of a stage take the same.
    places = [Place(stage * tensor, tensor, stages) for stage in range(stages)]
    cuts = [cutting(place) if ranks > 1 else None for place in places]
    outlines = [outline(config, cut) for cut in cuts]
    weights = [weights_bytes(one.network, device, one.quantize) for one in outlines]
    config = _sized(args, config, (total or free) if on_gpu else None, max(weights))
    each = free if on_gpu else free // ranks
    outlooks = [foresee(config, each, total=total, cut=cut) for cut in cuts]
    # All ranks have as many blocks as the one with the least room.
    outlook = min(outlooks, key=lambda one: (one.memory.num_blocks, -one.memory.weights_bytes))
    shape = outlook.shape
    return _Outlook(
        outlook.model.description.name,
        shape.layout,
        shape.dtype,
        shape.latent_size,
        shape.sliding_layers,
        outlook.memory,
        config,
        tensor * sum(weights),
    )


def _show(args: argparse.Namespace, outlook: _Outlook) -> int:
    memory, config = outlook.memory, outlook.config
    tensor, stages = args.tensor_parallel, args.pipeline_parallel
    everything = memory.needed_bytes(config.max_batch)
    lines = [
        *_model_lines(outlook),
        *_rank_lines(tensor, stages, outlook.weights),
        *memory.lines(),
        ("a sequence", f"of {memory.max_model_len} takes {size(memory.sequence_bytes)}"),
        (
            "all at once",
            f"{config.max_batch} sequences of {memory.model_len} take {size(everything)} with "
            "weights and activations: a device with "
            f"{size(int(everything / config.memory_share))}",
        ),
    ]
    for name, text in lines:
        print(f"{name:<12} {text}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        document = _document(outlook, everything)
        document |= {"tensor_parallel": tensor, "pipeline_parallel": stages}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _rank_lines(tensor: int, stages: int, weights: int) -> list[tuple[str, str]]:
    """weights: bytes of all ranks together."""
    if tensor * stages == 1:
        return []
    shape = f"{tensor} of a stage x {stages} stages"
    return [
        (
            "ranks",
            f"{tensor * stages} ({shape}), with {size(weights)} of weights together; what follows "
            "is of the one with the least room",
        )
    ]


def _model_lines(outlook: _Outlook) -> list[tuple[str, str]]:
    layout, memory = outlook.layout, outlook.memory
    heads = f"{layout.num_kv_heads} heads x ({layout.key_size} + {layout.value_size})"
    if rank := outlook.latent_size:
        heads = f"(a latent of {rank} + a rotated key of {layout.key_size - rank})"
    lines = [
        ("model", outlook.name),
        (
            "a token's KV",
            f"{size(memory.block_bytes // memory.block_size)}: {layout.num_layers} layers x "
            f"{heads} x {outlook.dtype}",
        ),
    ]
    stored, wire = memory.block_bytes // memory.block_size, layout.bytes_per_position
    if stored != wire:
        lines.append(("", f"values are stored as large as keys; {size(wire)} travel"))
    if sliding := outlook.sliding_layers:
        lines.append(
            ("", f"{sliding} layers look back over a window only, but are stored whole as well")
        )
    return lines


def _document(outlook: _Outlook, everything: int) -> dict[str, Any]:
    layout, memory = outlook.layout, outlook.memory
    return {
        "model": outlook.name,
        "layout": {
            name: value
            for name, value in asdict(layout).items()
            if name not in ("model_digest", "min_wire_version", "max_wire_version")
        },
        "sliding_layers": outlook.sliding_layers,
        "wire_bytes_per_token": layout.bytes_per_position,
        **asdict(memory),
        "max_model_len": memory.max_model_len,
        "num_tokens": memory.num_positions,
        "kv_bytes": memory.kv_bytes,
        "sequences": memory.sequences,
        "sequence_bytes": memory.sequence_bytes,
        "left_bytes": memory.left_bytes,
        "all_at_once_bytes": everything,
    }
