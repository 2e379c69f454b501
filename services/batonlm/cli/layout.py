"""Plans which processes `baton up` runs and with which flags. It starts none."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from batonlm.cli.forks import AVAILABLE
from batonlm.cli.models import WEIGHTS, hub_folder, may_be_hub_id
from batonlm.cli.ports import HOST, free_ports, free_row
from batonlm.cli.precision import Precision, choose_here
from batonlm.cli.throwaway_ca import ThrowawayCa
from batonlm.core.errors import InvalidArgument, install
from batonlm.engine.config import MIB
from batonlm.rpc.address import check_listen, is_loopback, join
from batonlm.worker.hardware import GPU_SHARE, usable_gpus


def gpu_memory_flags(engines: int, num_gpus: int, ranks: int = 1) -> tuple[str, ...]:
    """Returns the flags for the memory of each of `engines` workers of `ranks` ranks. The processes
    take GPUs evenly, and those that share one get equal parts of it."""
    on_one = -(-engines * ranks // num_gpus)
    return () if on_one == 1 else ("--memory-share", f"{GPU_SHARE / on_one:.3f}")


BUNDLED = "baton-tiny"
APART = 32
"""`local_prefill_tokens` if hand-overs are to be tried: all but tiny prompts are handed over,
although on one machine local prefill may be faster."""

ENGINE_ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The user's options of `baton up`."""

    model: str = ""
    served_model_name: tuple[str, ...] = ()
    """The name that clients use, and others that stand for it; empty: the folder's or hub id."""
    max_model_len: int = 0
    """The workers' option."""
    host: str = HOST
    """Where routers listen; all other processes listen on this machine only."""
    allow_anonymous: bool = False
    """The routers' option."""
    cors_origin: tuple[str, ...] = ()
    """The routers' option cors_origins."""
    prefill: int = 1
    decode: int = 1
    tokenizer: int = 1
    detokenizer: int = 1
    routers: int = 1
    embed_model: tuple[str, ...] = ()
    """Models of encode workers, one worker each."""
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
    kv_cache_dtype: str = "auto"
    """The workers' option."""
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
    is_fork: bool = False
    """Whether it starts as a fork of the process that imports for all engines, see `forks`."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def module(self) -> tuple[str, ...]:
        """What follows `python -m` in a fork's command."""
        return self.command[2:]


@dataclass(frozen=True, slots=True)
class Layout:
    """All processes of one `baton up`."""

    processes: tuple[ProcessSpec, ...]
    http: str
    grpc: str
    threads: int
    note: str = ""
    """What the model takes on this machine, in words for the user, where that is known."""
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
    return hub_folder(model), model


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
    for field_ in ("kv_memory_mib", "threads", "max_model_len"):
        if getattr(options, field_) < 0:
            raise InvalidArgument("must not be negative (0: chosen by Baton)", field=field_)
    if not (is_loopback(options.host) or options.keys or options.allow_anonymous):
        raise InvalidArgument(
            f"{options.host} is reached from other machines, so clients have to show keys: give "
            "--keys FILE ('baton keys new' makes one), or --allow-anonymous to answer anybody",
            field="host",
        )
    model, name = resolve_model(options.model)
    name, *aliases = options.served_model_name or (name,)
    engines = options.prefill + options.decode
    threads = options.threads or max(1, (os.cpu_count() or 1) // engines)
    memory: tuple[str, ...] = ("--kv-memory-mib", str(options.kv_memory_mib))
    precision, note = Precision(options.dtype, options.quantize), ""
    forks = False
    if options.runner == "torch":
        ranks = options.tensor_parallel * options.pipeline_parallel
        if num_gpus := len(usable_gpus(options.device)):
            if not options.kv_memory_mib:
                memory = gpu_memory_flags(engines, num_gpus, ranks)
        else:
            # Ranks are processes of their own, and a pinned worker is a command of its own.
            forks = AVAILABLE and engines > 1 and ranks == 1 and not options.engine_cpus
        if not num_gpus and (sys.platform == "linux" or not options.kv_memory_mib):
            # Fixed once for all, from the free memory before the first one starts, so that a
            # restarted worker has the same pool and the same longest sequence as before.
            chosen = choose_here(
                model, engines, dtype=options.dtype, quantize=options.quantize, threads=threads
            )
            precision, note = chosen.precision, chosen.words
            if not options.kv_memory_mib:
                memory = ("--kv-memory-mib", str(chosen.kv_bytes // MIB))
    encodes = [resolve_model(each) for each in options.embed_model]
    others = options.tokenizer + options.detokenizer + len(encodes)
    ports = iter(free_ports(2 * (engines + others)))
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
        fork = forks and role in ENGINE_ROLES
        processes.append(ProcessSpec(role, index, command, grpc, metrics, fork))
        addresses.setdefault(role, []).append(grpc)

    served = ("--model", str(model), "--model-name", name)
    engine = (
        *served,
        *("--threads", str(threads), "--transport", options.transport),
        *("--exact", str(options.exact).lower()),
        *("--dtype", precision.dtype, "--quantize", precision.quantize, "--device", options.device),
        *("--kv-cache-dtype", options.kv_cache_dtype),
        *("--tensor-parallel", str(options.tensor_parallel)),
        *("--pipeline-parallel", str(options.pipeline_parallel)),
        *memory,
        *(("--max-model-len", str(options.max_model_len)) if options.max_model_len else ()),
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
    for index, (folder, known_as) in enumerate(encodes):
        flags = ("--model", str(folder), "--model-name", known_as, "--device", options.device)
        add("encode", index, *flags, "--threads", str(threads))
    lists = [
        part
        for role, flag in (
            ("tokenizer", "--tokenizers"),
            ("prefill", "--prefills"),
            ("decode", "--decodes"),
            ("detokenizer", "--detokenizers"),
            ("encode", "--encodes"),
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
    if aliases:
        lists += ["--model", name, "--model-aliases", ",".join(aliases)]
    if options.cors_origin:
        lists += ["--cors-origins", ",".join(options.cors_origin)]
    if options.allow_anonymous:
        lists += ["--allow-anonymous"]
    http_port = options.http_port or free_row(options.routers)
    grpc_port = options.grpc_port or free_row(options.routers)
    if options.routers > 1:
        routers = (join(options.host, grpc_port + index) for index in range(options.routers))
        lists += ["--routers", ",".join(routers)]
    # This machine reaches a router that listens everywhere on its loopback address.
    reached = HOST if options.host in ("0.0.0.0", "::", "") else options.host
    for index in range(options.routers):
        http = join(options.host, http_port + index)
        grpc = join(options.host, grpc_port + index)
        listen = ("--http-listen", http, "--grpc-listen", grpc)
        tls = ca.flags("router") if ca else ()
        command = _command(
            ("batonlm.router",), options.other_cpus, *listen, *lists, *tls, *options.router_flags
        )
        reached_at = join(reached, http_port + index)
        processes.append(ProcessSpec("router", index, command, grpc, reached_at))
    return Layout(
        tuple(processes),
        f"{'https' if ca else 'http'}://{join(reached, http_port)}",
        join(reached, grpc_port),
        threads,
        note,
        str(ca.ca) if ca else "",
        secrets.token_hex(32),
    )


def check_machine(options: UpOptions) -> None:
    """Checks what this machine must have before a process is started: packages, free ports, and the
    model, which is fetched if necessary. Raises BatonError naming the option."""
    _check_installed(options)
    _check_ports(options)
    for model in (options.model, *options.embed_model):
        check_folder(resolve_model(model)[0])


def check_folder(folder: Path) -> None:
    """Raises InvalidArgument if a folder lacks a file that the processes read at their start."""
    for file, what in (("config.json", "configuration"), ("tokenizer.json", "tokenizer")):
        if not (folder / file).is_file():
            raise InvalidArgument(f"{folder} has no {file}, the model's {what}", field="model")
    if not any(folder.glob(WEIGHTS)):
        raise InvalidArgument(f"{folder} has no weights ({WEIGHTS})", field="model")


def _check_installed(options: UpOptions) -> None:
    """Raises InvalidArgument, with what to install, for a package that a worker would miss."""
    needed: dict[str, tuple[str, ...]] = {}
    if options.runner == "torch":
        needed["runner"] = ("torch", "transformers", "safetensors")
    if options.transport == "nixl":
        needed["transport"] = ("nixl",)
    if options.vllm_engine:
        needed["vllm_engine"] = ("smg_grpc_proto",)
    for field_, packages in needed.items():
        for package in packages:
            if find_spec(package) is None:
                extra = "vllm" if field_ == "vllm_engine" else "engine"
                raise InvalidArgument(f"needs {package}: {install(extra)}", field=field_)


def _check_ports(options: UpOptions) -> None:
    """Raises InvalidArgument naming the option of a port where the routers cannot listen."""
    for field_ in ("http_port", "grpc_port"):
        first = getattr(options, field_)
        if not 0 <= first <= 65535 - options.routers:
            raise InvalidArgument("must be from 0 to 65535 with those above it", field=field_)
        for port in range(first, first + options.routers) if first else ():
            check_listen(join(options.host, port), field_)


def _command(module: tuple[str, ...], cpus: str, *flags: str) -> tuple[str, ...]:
    pin = ("taskset", "-c", cpus) if cpus else ()
    return (*pin, sys.executable, "-m", *module, *flags)
