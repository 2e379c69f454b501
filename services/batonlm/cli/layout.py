"""Plans which processes `baton up` runs and with which flags. It starts none."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from math import prod
from pathlib import Path

from batonlm.cli.models import OTHERS, WEIGHTS, may_be_hub_id
from batonlm.cli.ports import HOST, free_ports, free_row
from batonlm.cli.throwaway_ca import ThrowawayCa
from batonlm.core.errors import InvalidArgument
from batonlm.engine.config import MIB
from batonlm.engine.memory import host_free_bytes, size
from batonlm.worker.hardware import CPU_SHARE, GPU_SHARE, usable_gpus

_FLOAT32_BYTES = 4


def memory_flags(folder: Path, engines: int, num_gpus: int, ranks: int = 1) -> tuple[str, ...]:
    """Returns the flags for the memory of each of `engines` workers of `ranks` ranks that serve a
    model.

    On GPUs, which the processes take evenly, those that share one get equal parts of it. On CPUs
    the amount is fixed once for all of them, from the free memory before the first one starts, so
    that a restarted worker has the same pool and the same longest sequence as before. Raises
    InvalidArgument if the weights alone do not fit.
    """
    if num_gpus:
        on_one = -(-engines * ranks // num_gpus)
        return () if on_one == 1 else ("--memory-share", f"{GPU_SHARE / on_one:.3f}")
    free = host_free_bytes()
    weights = _FLOAT32_BYTES * num_weights(folder)
    kv = int(free * CPU_SHARE) // engines - weights
    if kv < MIB:
        raise InvalidArgument(
            f"{engines} engine processes take {size(engines * weights)} for weights in float32, "
            f"and {size(free)} are free",
            field="model",
        )
    return ("--kv-memory-mib", str(kv // MIB))


def num_weights(folder: Path) -> int:
    """Returns the number of elements of all tensors in a folder's safetensors files."""
    return sum(_elements(file) for file in folder.glob("*.safetensors"))


def _elements(file: Path) -> int:
    """A file's header is the length of a JSON object, 8 bytes little-endian, and the object."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, file.stat().st_size))
    try:
        tensors = json.loads(header)
        return sum(prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0  # an invalid file: the workers report it by name


BUNDLED = "baton-tiny"
APART = 32
"""`local_prefill_tokens` if hand-overs are to be tried: all but tiny prompts are handed over,
although on one machine local prefill may be faster."""

ENGINE_ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The user's options of `baton up`."""

    model: str = ""
    prefill: int = 1
    decode: int = 1
    tokenizer: int = 1
    detokenizer: int = 1
    routers: int = 1
    router_flags: tuple[str, ...] = ()
    """Additional flags of every router."""
    engine_flags: tuple[str, ...] = ()
    """Additional flags of every prefill and decode worker."""
    decode_flags: tuple[str, ...] = ()
    """Additional flags of every decode worker."""
    http_port: int = 8000
    """Port of the first router; the others have the ports above it. 0: free ports."""
    grpc_port: int = 50051
    """See http_port."""
    transport: str = "nixl"
    exact: bool = True
    dtype: str = "auto"
    quantize: str = "none"
    device: str = "auto"
    """The workers' option."""
    threads: int = 0
    """Of a worker, whose ranks share them."""
    tensor_parallel: int = 1
    """The workers' option."""
    pipeline_parallel: int = 1
    """The same."""
    runner: str = "torch"
    """fake: prefill and decode workers are those of `batonlm.testing.worker`."""
    kv_memory_mib: int = 0
    """Per engine process; 0: an equal share of the free memory."""
    engine_cpus: str = ""
    """Cores for prefill and decode, in taskset's notation; empty: not pinned."""
    other_cpus: str = ""
    """Cores for router, tokenizer and detokenizer."""
    keys: str = ""
    """File of the API keys that routers accept; empty: no keys are required."""
    vllm_engine: bool = False
    """Routers serve gateways and give them the model's tokenizer."""
    local_prefill_tokens: int = -1
    """The router's option; below 0: not set on its command line."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its role and index, its command line and its addresses."""

    role: str
    index: int
    command: tuple[str, ...]
    grpc: str
    metrics: str

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Layout:
    """All processes of one `baton up`."""

    processes: tuple[ProcessSpec, ...]
    http: str
    grpc: str
    threads: int
    ca: str = ""
    """File of the CA that all processes trust; empty: no TLS."""
    peer_token: str = field(default="", repr=False)
    """The token by which the processes authenticate to each other; empty: none. It is passed in the
    environment, because every user can read command lines."""

    def metrics_url(self, spec: ProcessSpec) -> str:
        """A router's metrics are on its public HTTP port; those of others are not public."""
        scheme = "https" if self.ca and spec.role == "router" else "http"
        return f"{scheme}://{spec.metrics}/metrics"


def resolve_model(model: str) -> tuple[Path, str]:
    """Returns the folder of a model and the name that clients use for it. Downloads a hub id.

    Raises InvalidArgument if there is no such model.
    """
    if not model:
        return Path(str(files("batonlm"))) / "models" / BUNDLED, BUNDLED
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if not may_be_hub_id(model):
        raise InvalidArgument(f"there is no model folder {model!r}", field="model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, allow_patterns=[*OTHERS, WEIGHTS])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        raise InvalidArgument(
            f"{model!r} is neither a folder nor a model that can be had from the hub", field="model"
        ) from None
    return Path(folder), model


def plan(options: UpOptions, ca: ThrowawayCa | None = None) -> Layout:
    """Assigns flags and free ports to every process. Raises InvalidArgument.

    ca: the issuer of their certificates; None: no TLS.
    """
    at_least_1 = ("decode", "tokenizer", "detokenizer", "routers")
    for name in (*at_least_1, "tensor_parallel", "pipeline_parallel"):
        if getattr(options, name) < 1:
            raise InvalidArgument("must be at least 1", field=name)
    if options.prefill < 0:
        raise InvalidArgument("must not be negative (0 prefills on decode)", field="prefill")
    if options.kv_memory_mib < 0:
        raise InvalidArgument("must not be negative (0 shares out)", field="kv_memory_mib")
    model, name = resolve_model(options.model)
    engines = options.prefill + options.decode
    threads = options.threads or max(1, (os.cpu_count() or 1) // engines)
    memory: tuple[str, ...] = ("--kv-memory-mib", str(options.kv_memory_mib))
    if not options.kv_memory_mib and options.runner == "torch":
        ranks = options.tensor_parallel * options.pipeline_parallel
        memory = memory_flags(model, engines, len(usable_gpus(options.device)), ranks)
    ports = iter(free_ports(2 * (engines + options.tokenizer + options.detokenizer)))
    processes: list[ProcessSpec] = []
    addresses: dict[str, list[str]] = {}

    def add(role: str, index: int, *flags: str) -> None:
        grpc, metrics = f"{HOST}:{next(ports)}", f"{HOST}:{next(ports)}"
        cpus = options.engine_cpus if role in ENGINE_ROLES else options.other_cpus
        listen = ("--listen", grpc, "--metrics-listen", metrics)
        fake = role in ENGINE_ROLES and options.runner == "fake"
        module = ("batonlm.testing.worker", role) if fake else (f"batonlm.{role}",)
        tls = ca.flags(role) if ca else ()
        command = _command(module, cpus, *listen, *flags, *tls)
        processes.append(ProcessSpec(role, index, command, grpc, metrics))
        addresses.setdefault(role, []).append(grpc)

    served = ("--model", str(model), "--model-name", name)
    engine = (
        *served,
        *("--threads", str(threads), "--transport", options.transport),
        *("--exact", str(options.exact).lower()),
        *("--dtype", options.dtype, "--quantize", options.quantize, "--device", options.device),
        *("--tensor-parallel", str(options.tensor_parallel)),
        *("--pipeline-parallel", str(options.pipeline_parallel)),
        *memory,
        *options.engine_flags,
    )
    for role, count, flags in (
        ("tokenizer", options.tokenizer, served),
        ("prefill", options.prefill, engine),
        ("decode", options.decode, (*engine, *options.decode_flags)),
        ("detokenizer", options.detokenizer, served),
    ):
        for index in range(count):
            add(role, index, *flags)
    lists = [
        part
        for role, flag in (
            ("tokenizer", "--tokenizers"),
            ("prefill", "--prefills"),
            ("decode", "--decodes"),
            ("detokenizer", "--detokenizers"),
        )
        for part in (flag, ",".join(addresses.get(role, [])))
        if addresses.get(role)
    ]
    if options.keys:
        keys = str(Path(options.keys).expanduser().resolve())
        lists += ["--keys", keys]
    if options.vllm_engine:
        lists += ["--vllm-engine", "true", "--vllm-tokenizer", str(model)]
    if options.local_prefill_tokens >= 0:
        lists += ["--local-prefill-tokens", str(options.local_prefill_tokens)]
    http_port = options.http_port or free_row(options.routers)
    grpc_port = options.grpc_port or free_row(options.routers)
    if options.routers > 1:
        routers = (f"{HOST}:{grpc_port + index}" for index in range(options.routers))
        lists += ["--routers", ",".join(routers)]
    for index in range(options.routers):
        http = f"{HOST}:{http_port + index}"
        grpc = f"{HOST}:{grpc_port + index}"
        listen = ("--http-listen", http, "--grpc-listen", grpc)
        tls = ca.flags("router") if ca else ()
        command = _command(
            ("batonlm.router",), options.other_cpus, *listen, *lists, *tls, *options.router_flags
        )
        processes.append(ProcessSpec("router", index, command, grpc, http))
    return Layout(
        tuple(processes),
        f"{'https' if ca else 'http'}://{HOST}:{http_port}",
        f"{HOST}:{grpc_port}",
        threads,
        str(ca.ca) if ca else "",
        secrets.token_hex(32),
    )


def _command(module: tuple[str, ...], cpus: str, *flags: str) -> tuple[str, ...]:
    pin = ("taskset", "-c", cpus) if cpus else ()
    return (*pin, sys.executable, "-m", *module, *flags)
