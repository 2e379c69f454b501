"""Plans which processes `baton up` runs and with which flags. It starts none."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batonlm.cli.forks import AVAILABLE
from batonlm.cli.ports import HOST, free_ports, free_row
from batonlm.cli.precision import ModelShare, Precision, choose_here, read_weights
from batonlm.cli.throwaway_ca import ThrowawayCa
from batonlm.core.errors import InvalidArgument, install
from batonlm.engine.config import CHOICES, MIB
from batonlm.registry.sources import WEIGHTS, hub_folder, in_object_store, may_be_hub_id
from batonlm.rpc.address import check_listen, is_loopback, join
from batonlm.rpc.config import flag, suggest
from batonlm.rpc.model_folder import check_same_tokenizer, tokenizer_digest
from batonlm.worker.hardware import GPU_SHARE, usable_gpus
from batonlm.worker.options import check_drafting


def gpu_memory_flags(ranks: int, num_gpus: int) -> tuple[str, ...]:
    """Returns the flags for the memory of each worker, where all of them have `ranks` ranks. The
    processes take GPUs evenly, and those that share one get equal parts of it."""
    on_one = -(-ranks // num_gpus)
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
    """A folder or hub id. `of_model` says what more it may say."""
    more_models: tuple[str, ...] = ()
    """Others that are served beside it. Requests that name none are for the first one."""
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
    adapters: tuple[str, ...] = ()
    """The workers' option, NAME=FOLDER each, of the only model."""
    adapters_folder: str = ""
    """The workers' option."""
    adapters_on_use: bool = False
    """The workers' option."""
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
    speculation: str = "off"
    """The decode workers' option."""
    draft_model: str = ""
    """A folder or hub id, of the decode workers."""
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
    aliases: str = ""
    """File of names that stand for models, which routers follow; empty: none."""
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
    model: str = ""
    """The name of its model; empty: it serves all."""
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
    """Returns the folder of a model and the name that clients use for it. Downloads a hub id, and
    what is in an object store.

    Raises InvalidArgument if there is no such model.
    """
    if not model:
        return Path(str(files("batonlm"))) / "models" / BUNDLED, BUNDLED
    if in_object_store(model):
        return _from_object_store(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if not may_be_hub_id(model):
        raise InvalidArgument(f"there is no model folder {model!r}", field="model")
    return hub_folder(model), model


@cache
def _from_object_store(url: str) -> tuple[Path, str]:
    """The same, once for each command. Workers find the folder in use from then on."""
    from batonlm.registry.cache import default_cache, fetched
    from batonlm.registry.object_store import object_source

    source = object_source(url)
    into = Path(os.environ.get("BATON_MODEL_CACHE", "") or default_cache()).expanduser()
    try:
        folder = fetched(
            source,
            into,
            lambda text: print(f"{source.name}: {text}", file=sys.stderr, flush=True),
            most_bytes=int(os.environ.get("BATON_MODEL_CACHE_GIB", "") or 0) << 30,
        )
    except OSError as error:
        raise InvalidArgument(f"{into} cannot be used: {error.strerror}", field="model") from None
    except ValueError:
        raise InvalidArgument("BATON_MODEL_CACHE_GIB is no number", field="model") from None
    return folder, source.served_name


_OWN = {
    name: type(getattr(UpOptions(), name))
    for name in (
        *("prefill", "decode", "tokenizer", "detokenizer", "max_model_len", "kv_memory_mib"),
        *("tensor_parallel", "pipeline_parallel"),
        *("dtype", "quantize", "kv_cache_dtype", "device", "speculation", "draft_model"),
    )
}
"""The options that one of several models may have for itself."""


def of_model(text: str, options: UpOptions) -> UpOptions:
    """Returns the options of one model. text: `[NAME=]FOLDER_OR_ID[,OPTION=VALUE…]`, whose options
    replace the common ones. A folder whose own name has these signs is taken as it is.

    Raises InvalidArgument (`model`).
    """
    if Path(text).expanduser().is_dir():
        return replace(options, model=text, more_models=())
    first, *given = text.split(",")
    before, equals, folder = first.partition("=")
    own: dict[str, Any] = {"model": folder if equals else first, "more_models": ()}
    if equals:
        if not before or options.served_model_name:
            why = "names it too" if before else "has no name before ="
            raise InvalidArgument(f"{first!r} {why}", field="model")
        own["served_model_name"] = (before,)
    for each in given:
        option, _, value = each.partition("=")
        name = option.strip().removeprefix("--").replace("-", "_")
        if name not in _OWN:
            names = [flag(known)[2:] for known in _OWN]
            hint = suggest(option, names) or f"; it may have {', '.join(names)}"
            raise InvalidArgument(f"a model has no option {option!r}{hint}", field="model")
        try:
            own[name] = _OWN[name](value)
        except ValueError:
            raise InvalidArgument(f"{each!r} is no whole number", field="model") from None
        if name != "device" and name in CHOICES and value not in CHOICES[name]:
            allowed = ", ".join(CHOICES[name])
            raise InvalidArgument(f"{each!r} is not one of {allowed}", field="model")
    return replace(options, **own)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of a layout."""

    options: UpOptions
    """Its own."""
    folder: Path
    name: str
    aliases: tuple[str, ...]
    draft_model: str = ""
    """The folder of its decode workers' draft model."""

    @property
    def engines(self) -> int:
        """Its engine processes, each with the weights or a rank's part of them."""
        return self.options.prefill + self.options.decode

    @property
    def ranks(self) -> int:
        return self.options.tensor_parallel * self.options.pipeline_parallel


def served_models(options: UpOptions) -> list[ServedModel]:
    """Returns the models, with their names. Raises InvalidArgument."""
    texts = (options.model, *options.more_models)
    if len(texts) > 1 and options.served_model_name:
        raise InvalidArgument(
            "names one model: give several their names by --model NAME=FOLDER",
            field="served_model_name",
        )
    if len(texts) > 1 and options.adapters:
        raise InvalidArgument(
            "are of one model: serve one, or load them later by /v1/load_lora_adapter",
            field="adapter",
        )
    if len(texts) > 1 and options.vllm_engine:
        raise InvalidArgument("its protocol names no model: serve one", field="vllm_engine")
    found: list[ServedModel] = []
    for text in texts:
        own = of_model(text, options)
        _check_numbers(own)
        folder, name = resolve_model(own.model)
        name, *aliases = own.served_model_name or (name,)
        if "," in name and len(texts) > 1:
            raise InvalidArgument(
                f"{name!r} has a comma: give it another name, --model NAME=FOLDER", field="model"
            )
        if any(name == other.name for other in found):
            raise InvalidArgument(
                f"two models are called {name!r}: give one another name, --model NAME=FOLDER",
                field="model",
            )
        check_drafting(own.speculation, own.draft_model)
        draft = str(resolve_model(own.draft_model)[0]) if own.draft_model else ""
        found.append(ServedModel(own, folder, name, tuple(aliases), draft))
    return found


def _check_numbers(options: UpOptions) -> None:
    """Raises InvalidArgument."""
    at_least_1 = ("decode", "tokenizer", "detokenizer", "routers")
    for name in (*at_least_1, "tensor_parallel", "pipeline_parallel"):
        if getattr(options, name) < 1:
            raise InvalidArgument("must be at least 1", field=name)
    if options.prefill < 0:
        raise InvalidArgument("must not be negative (0 prefills on decode)", field="prefill")
    for field_ in ("kv_memory_mib", "threads", "max_model_len"):
        if getattr(options, field_) < 0:
            raise InvalidArgument("must not be negative (0: chosen by Baton)", field=field_)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """In which numbers a model's engine processes compute, and in which memory."""

    precision: Precision
    memory: tuple[str, ...]
    """Flags."""
    words: str = ""
    """For the user, where they were chosen here."""
    forks: bool = False
    """Whether they may start as forks: not with GPUs, and not with ranks, which are processes of
    their own. A pinned worker is a command of its own."""


def _numbers(models: Sequence[ServedModel], threads: int) -> list[_Numbers]:
    """Shares out this machine's memory: of the host for those that compute on CPUs, and each GPU in
    equal parts. Raises InvalidArgument, with the sums, where that does not suffice."""
    gpus = [
        {gpu.uuid for gpu in usable_gpus(model.options.device)}
        if model.options.runner == "torch"
        else set()
        for model in models
    ]
    found: list[_Numbers] = []
    for model, own in zip(models, gpus, strict=True):
        options = model.options
        memory: tuple[str, ...] = ("--kv-memory-mib", str(options.kv_memory_mib))
        if own and not options.kv_memory_mib:
            ranks = sum(
                other.engines * other.ranks
                for other, theirs in zip(models, gpus, strict=True)
                if own & theirs
            )
            memory = gpu_memory_flags(ranks, len(own))
        precision = Precision(options.dtype, options.quantize)
        forks = AVAILABLE and not own and model.ranks == 1 and not options.engine_cpus
        found.append(_Numbers(precision, memory, forks=forks and options.runner == "torch"))
    # Fixed once for all, from the free memory before the first one starts, so that a restarted
    # worker has the same pool and the same longest sequence as before.
    on_cpus = [
        index
        for index, model in enumerate(models)
        if model.options.runner == "torch"
        and not gpus[index]
        and (sys.platform == "linux" or not model.options.kv_memory_mib)
    ]
    shares = []
    for model in map(models.__getitem__, on_cpus):
        options = model.options
        kv, weights = options.kv_memory_mib * MIB, read_weights(model.folder, model.draft_model)
        shares.append(
            ModelShare(weights, model.engines, options.dtype, options.quantize, kv, model.name)
        )
    every = choose_here(shares, threads=threads) if shares else []
    for index, chosen in zip(on_cpus, every, strict=True):
        memory = ("--kv-memory-mib", str(chosen.kv_bytes // MIB))
        found[index] = replace(
            found[index], precision=chosen.precision, memory=memory, words=chosen.words
        )
    return found


def _by_tokenizer(models: Sequence[ServedModel]) -> list[list[ServedModel]]:
    """Returns the models in groups that one tokenizer and one detokenizer serve: their files are
    the same, byte for byte."""
    found: dict[str, list[ServedModel]] = {}
    for model in models:
        digest = tokenizer_digest(model.folder) if len(models) > 1 else ""
        found.setdefault(digest, []).append(model)
    return list(found.values())


def _served(model: ServedModel) -> tuple[str, ...]:
    return ("--model", str(model.folder), "--model-name", model.name)


def _adapter_flags(options: UpOptions) -> list[str]:
    """Raises InvalidArgument (`adapter`)."""
    flags, given = [], []
    for text in options.adapters:
        name, equals, folder = text.partition("=")
        path = Path(folder).expanduser().resolve()
        if not (name and equals and folder and path.is_dir()) or "," in text:
            raise InvalidArgument(f"{text!r} is not NAME=FOLDER, without a comma", field="adapter")
        given.append(f"{name}={path}")
    if given:
        flags += ["--adapters", ",".join(given)]
    if options.adapters_on_use:
        flags += ["--adapters-on-use"]
    if in_object_store(options.adapters_folder):
        flags += ["--adapters-folder", options.adapters_folder]
    elif options.adapters_folder:
        shared = Path(options.adapters_folder).expanduser().resolve()
        if not shared.is_dir():
            raise InvalidArgument(f"there is no folder {shared}", field="adapters_folder")
        flags += ["--adapters-folder", str(shared)]
    return flags


def _engine_flags(model: ServedModel, numbers: _Numbers, threads: int) -> tuple[str, ...]:
    options, precision = model.options, numbers.precision
    return (
        *_served(model),
        *("--threads", str(threads), "--transport", options.transport),
        *("--exact", str(options.exact).lower()),
        *("--dtype", precision.dtype, "--quantize", precision.quantize, "--device", options.device),
        *("--kv-cache-dtype", options.kv_cache_dtype),
        *("--tensor-parallel", str(options.tensor_parallel)),
        *("--pipeline-parallel", str(options.pipeline_parallel)),
        *numbers.memory,
        *(("--max-model-len", str(options.max_model_len)) if options.max_model_len else ()),
        *_adapter_flags(options),
        *options.engine_flags,
    )


def plan(options: UpOptions, ca: ThrowawayCa | None = None) -> Layout:
    """Assigns flags and free ports to every process. Raises InvalidArgument.

    ca: the issuer of their certificates; None: no TLS.
    """
    if not (is_loopback(options.host) or options.keys or options.allow_anonymous):
        raise InvalidArgument(
            f"{options.host} is reached from other machines, so clients have to show keys: give "
            "--keys FILE ('baton keys new' makes one), or --allow-anonymous to answer anybody",
            field="host",
        )
    models = served_models(options)
    engines = sum(model.engines for model in models)
    threads = options.threads or max(1, (os.cpu_count() or 1) // engines)
    numbers = _numbers(models, threads)
    note = "\n".join(
        f"{model.name}: {own.words}" if len(models) > 1 else own.words
        for model, own in zip(models, numbers, strict=True)
        if own.words
    )
    processes: list[ProcessSpec] = []
    wanted: list[tuple[str, str, tuple[str, ...], bool]] = []
    """Role, model, flags, and whether it is a fork."""
    for role in ("tokenizer", "prefill", "decode", "detokenizer"):
        if role in ENGINE_ROLES:
            for model, own in zip(models, numbers, strict=True):
                flags = _engine_flags(model, own, threads)
                more: tuple[str, ...] = ()
                if role == "decode":
                    drafts = ["--speculation", model.options.speculation]
                    if model.draft_model:
                        drafts += ["--draft-model", model.draft_model]
                    more = (*drafts, *options.decode_flags)
                fork = own.forks and engines > 1
                wanted += [(role, model.name, (*flags, *more), fork)] * getattr(model.options, role)
        else:
            for several in _by_tokenizer(models):
                served = _served(several[0])
                names = ",".join(model.name for model in several)
                count = max(getattr(model.options, role) for model in several)
                wanted += [(role, names, served, False)] * count
    for each in options.embed_model:
        folder, known_as = resolve_model(each)
        flags = ("--model", str(folder), "--model-name", known_as, "--device", options.device)
        wanted.append(("encode", known_as, (*flags, "--threads", str(threads)), False))
    addresses: dict[str, list[str]] = {}
    ports = iter(free_ports(2 * len(wanted)))
    for role, name, flags, fork in wanted:
        grpc, metrics = f"{HOST}:{next(ports)}", f"{HOST}:{next(ports)}"
        cpus = options.engine_cpus if role in ENGINE_ROLES else options.other_cpus
        listen = ("--listen", grpc, "--metrics-listen", metrics)
        fake = role in ENGINE_ROLES and options.runner == "fake"
        module = ("batonlm.testing.worker", role) if fake else (f"batonlm.{role}",)
        tls = ca.flags(role) if ca else ()
        command = _command(module, cpus, *listen, *flags, *tls)
        known = addresses.setdefault(role, [])
        processes.append(ProcessSpec(role, len(known), command, grpc, metrics, name, fork))
        known.append(grpc)
    lists = [part for role, found in addresses.items() for part in (f"--{role}s", ",".join(found))]
    for option, file in (("--keys", options.keys), ("--aliases", options.aliases)):
        if file:
            lists += [option, str(Path(file).expanduser().resolve())]
    if options.vllm_engine:
        lists += ["--vllm-engine", "true", "--vllm-tokenizer", str(models[0].folder)]
    if options.local_prefill_tokens >= 0:
        lists += ["--local-prefill-tokens", str(options.local_prefill_tokens)]
    if len(models) > 1 or models[0].aliases:
        lists += ["--model", ",".join(model.name for model in models)]
    if models[0].aliases:
        lists += ["--model-aliases", ",".join(models[0].aliases)]
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
    models = served_models(options)
    folders = [model.folder for model in models]
    for folder in (*folders, *(resolve_model(model)[0] for model in options.embed_model)):
        check_folder(folder)
    for model in models:
        if model.draft_model:
            try:
                check_folder(Path(model.draft_model))
                check_same_tokenizer(model.folder, Path(model.draft_model))
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="draft_model") from error


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
