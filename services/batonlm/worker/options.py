"""The options of prefill and decode workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.prefix import UNIT_TOKENS
from batonlm.core.scheduler.policy import SPECULATION, QueueLimit, SchedulerPolicy
from batonlm.engine.config import CHOICES
from batonlm.rpc.address import split
from batonlm.rpc.config import option
from batonlm.rpc.options import ServingOptions

MAX_WAITING = 1024
"""Most prompts that wait: bounds a queue of tiny ones, where the tokens that may wait do not."""


ADAPTER_MIB = 256

LEADER_VARIABLE = "LWS_LEADER_ADDRESS"
"""Of a LeaderWorkerSet: the same in all pods of a group, another one in each group. Groups of other
machines differ by their tokens."""

SHORTEST_TOKEN = 16


def check_token(ranks_token: str) -> None:
    """Raises InvalidArgument for a token that could be guessed."""
    if len(ranks_token) < SHORTEST_TOKEN:
        raise InvalidArgument(
            f"must have {SHORTEST_TOKEN} characters at least, the same ones on all machines of a "
            "group",
            field="ranks_token",
        )


def check_drafting(speculation: str, draft_model: str) -> None:
    """Raises InvalidArgument where one of the two is missing."""
    if speculation == "draft" and not draft_model:
        raise InvalidArgument("draft needs draft_model", field="speculation")
    if draft_model and speculation != "draft":
        raise InvalidArgument("needs speculation draft", field="draft_model")


@dataclass(frozen=True, slots=True)
class WorkerOptions(ServingOptions):
    """What both roles share: model, memory and KV transport, and how a worker is served."""

    REMOVED: ClassVar = ServingOptions.REMOVED | {
        *(
            "vllm_aliases",
            "max_waiting",
            "probe_interval_s",
            "handover_timeout_s",
            "slots",
            "slot_mib",
        )
    }

    dtype: str = option("auto", "number type of weights and KV", choices=CHOICES["dtype"])
    kv_cache_dtype: str = option(
        "auto",
        "number type of KV in the pool; auto: dtype; int8 and fp8 (e4m3, less precise): one byte a "
        "number with a scale for each position and head, in half of bfloat16's memory. Workers "
        "that hand over to each other keep the same, or name a kv_wire_dtype",
        choices=CHOICES["kv_cache_dtype"],
    )
    kv_wire_dtype: str = option(
        "auto",
        "number type of KV that is handed over, the same on both sides; auto: the KV's own. A "
        "narrower one moves fewer bytes and loses precision (int8, fp8: see kv_cache_dtype): "
        "tokens after a hand-over may then differ, in exact mode too",
        choices=CHOICES["kv_wire_dtype"],
    )
    device: str = option(
        "auto",
        "where steps run: cpu; cuda, a GPU; cuda:N, the N-th that CUDA_VISIBLE_DEVICES allows; "
        "GPU-UUID or MIG-UUID; auto: a GPU where there is one. Of several, workers of one machine "
        "take the one that the fewest of them use",
    )
    threads: int = option(0, "torch threads; 0: all cores", unit="threads", minimum=0, maximum=1024)
    tensor_parallel: int = option(
        1,
        "ranks among which each layer's heads, experts and the vocabulary are split; one GPU "
        "each, or a share of this machine's cores. Threads are shared out, and exact holds among "
        "workers of as many ranks",
        unit="ranks", minimum=1, maximum=64,
    )  # fmt: skip
    pipeline_parallel: int = option(
        1, "stages of consecutive layers, of tensor_parallel ranks each",
        unit="stages", minimum=1, maximum=64,
    )  # fmt: skip
    machines: int = option(
        1,
        "machines that share out the stages; each other one runs baton-ranks, which joins this one",
        unit="machines", minimum=1, maximum=64,
    )  # fmt: skip
    ranks_listen: str = option(
        "", "this machine's own address, at which the others join it; its interface is the one on "
        "which ranks exchange what they compute", unit="host:port",
    )  # fmt: skip
    ranks_token: str = option(
        "", "secret that the machines of a group show each other, of 16 characters at least. Set "
        "it in the environment", secret=True,
    )  # fmt: skip
    ray_address: str = option(
        "", "the Ray cluster whose machines run the other ranks: auto, of which this one is a "
        "node, or its head, of which this one becomes a node. Then ranks_token may be left out. "
        "Empty: somebody else starts baton-ranks there", unit="host:port",
    )  # fmt: skip
    exact: bool = option(True, "same tokens whatever runs beside them")
    quantize: str = option(
        "none",
        "weights of linear layers in 8 or 4 bits: int8 and int4 on CPUs, fp8 on GPUs",
        choices=CHOICES["quantize"],
    )
    graphs: bool = option(True, "record CUDA graphs of decode steps, on a GPU")
    decoder: str = option(
        "auto",
        "what computes layers; auto: the fused decoder for models that it covers, and else "
        "transformers' own code",
        choices=CHOICES["decoder"],
    )
    max_model_len: int = option(
        0, "longest sequence; 0: the model's, or what the pool holds", unit="tokens", minimum=0
    )
    step_tokens: int = option(
        0, "most prompt tokens of a step; 0: by device and model", unit="tokens", minimum=0
    )
    max_running: int = option(
        0, "sequences at once, the pool takes no more memory than they need; 0: by device",
        minimum=0, maximum=4096,
    )  # fmt: skip
    block_size: int = option(16, "positions of a block", unit="tokens", minimum=1, maximum=1024)
    kv_memory_mib: int = option(
        0, "memory for KV; 0: what memory_share has left", unit="MiB", minimum=0
    )
    memory_share: float = option(
        0.0,
        "of a GPU's memory, or of the host memory that is free at start, what weights, activations "
        "and KV may take together; 0: by device",
        minimum=0.0, maximum=1.0,
    )  # fmt: skip
    adapters: tuple[str, ...] = option(
        (), "LoRA adapters to load at start, each as name=folder; clients name them as a model"
    )
    adapters_folder: str = option(
        "",
        "folder below which adapters may be loaded at run time, or s3://bucket/prefix; empty: none "
        "may",
        unit="folder",
    )
    adapters_on_use: bool = option(
        False,
        "load an adapter from adapters_folder when a request names it; what is not used makes room",
    )
    adapter_memory_mib: int = option(
        0,
        "memory for adapters that are ready to compute; 0: 256 where adapters or adapters_folder "
        "are given, and else none",
        unit="MiB",
        minimum=0,
        maximum=1 << 20,
    )
    adapter_host_mib: int = option(
        0,
        "host memory for all adapters that are loaded, as they are stored; 0: as much as "
        "adapter_memory_mib",
        unit="MiB",
        minimum=0,
        maximum=1 << 20,
    )
    prefix_host_mib: int = option(
        0, "host memory for KV that the prefix cache has no room for any more; 0: none", unit="MiB",
        minimum=0,
    )  # fmt: skip
    prefix_disk_mib: int = option(
        0,
        "disk space for KV of the prefix cache, which is found again after a restart; 0: none",
        unit="MiB",
        minimum=0,
    )
    prefix_disk_folder: str = option(
        "",
        "where that disk space is; several workers may use one folder. KV is as confidential as "
        "its prompt. Empty: kv in model_cache",
        unit="folder",
    )
    prefix_store: str = option(
        "",
        "the same in a place that all workers share and may write: s3://bucket/prefix "
        "(credentials as for models), or a folder of a shared file system",
        unit="folder",
    )
    prefix_store_gib: int = option(
        100, "most that is kept in prefix_store, by all workers together", unit="GiB", minimum=1
    )
    prefix_restore_tokens: int = option(
        -1,
        "fewest tokens that are brought back from there for an input; -1: as many as take less "
        "time than to compute them",
        unit="tokens",
        minimum=-1,
    )
    transport: str = option("auto", "how KV moves", choices=("auto", "nixl", "loopback"))
    kv_network: str = option(
        "auto",
        "what KV moves on; local: this machine's shared memory, isolated: a network that only "
        "Baton's workers reach, trusted: one whose every user is trusted with this process's "
        "memory; auto: local for a worker that is reached on loopback only, else refused",
        choices=("auto", "local", "isolated", "trusted"),
    )
    ucx_transports: tuple[str, ...] = option(
        (), "what UCX may use, as UCX_TLS names it; empty: what kv_network allows"
    )
    ucx_devices: tuple[str, ...] = option(
        (), "network devices UCX may use, as UCX_NET_DEVICES names them; empty: all"
    )
    kv_staging: str = option(
        "auto",
        "where the buffers lie that KV passes on its way; device: in the GPU's memory; auto: "
        "there, if the network can read it (GPUDirect, or the same machine), else in the host's",
        choices=("auto", "host", "device"),
    )
    staging_mib: int = option(
        0, "memory of these buffers; 0: 64 where KV is kept in the host, 512 on a GPU", unit="MiB",
        minimum=0, maximum=65536,
    )  # fmt: skip
    standby: bool = option(
        False,
        "stand by with everything loaded: routers give it work only while another worker of its "
        "role is missing",
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for machines that cannot share out the stages or find each
        other."""
        ServingOptions.__post_init__(self)
        for text in self.adapters:
            name, equals, folder = text.partition("=")
            if not (name and equals and folder):
                raise InvalidArgument(f"{text[:80]!r} must be name=folder", field="adapters")
        names = ("prefix_host_mib", "prefix_disk_mib", "prefix_store")
        tiers = [name for name in names if getattr(self, name)]
        if tiers and UNIT_TOKENS % self.block_size:
            raise InvalidArgument(f"needs a block_size that divides {UNIT_TOKENS}", field=tiers[0])
        if self.adapters_on_use and not self.adapters_folder:
            raise InvalidArgument("needs adapters_folder", field="adapters_on_use")
        if self.machines == 1:
            if self.ray_address:
                raise InvalidArgument("needs machines above 1", field="ray_address")
            return
        if self.pipeline_parallel % self.machines:
            raise InvalidArgument(
                f"must be a multiple of machines, {self.machines}: the ranks of one stage are on "
                "one machine",
                field="pipeline_parallel",
            )
        host, port = split(self.ranks_listen, "ranks_listen")
        if host in ("0.0.0.0", "::") or not port:
            raise InvalidArgument(
                "must be this machine's own address, on which the others reach it, and a port",
                field="ranks_listen",
            )
        if self.ranks_token or not self.ray_address:
            check_token(self.ranks_token)

    @property
    def adapter_mib(self) -> int:
        """Memory for adapters that are ready to compute, in MiB."""
        given = bool(self.adapters or self.adapters_folder)
        return self.adapter_memory_mib or ADAPTER_MIB * given

    @property
    def kv_folder(self) -> Path:
        """Where KV of the prefix cache is kept on a disk."""
        given = self.prefix_disk_folder
        return Path(given).expanduser() if given else self.cache_folder / "kv"

    @property
    def queue_limit(self) -> QueueLimit:
        """Refuses prompts while the prompt tokens of two steps wait, or MAX_WAITING prompts."""
        return QueueLimit(2 * self.step_tokens, MAX_WAITING)


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerOptions):
    """One prefill worker."""

    # It preempts no sequence, so it swaps nothing.
    REMOVED: ClassVar = WorkerOptions.REMOVED | {
        *("order", "swap_host_mib", "swap_disk_mib", "swap_folder")
    }


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerOptions):
    """One decode worker."""

    REMOVED: ClassVar = WorkerOptions.REMOVED | {"resume_window_s"}

    inter_token_ms: float = option(
        0.0,
        "longest time between two tokens that admission and prefill chunks aim at; 0: none",
        unit="ms",
        minimum=0.0,
    )
    swap_host_mib: int = option(
        256, "host memory for KV of preempted sequences", unit="MiB", minimum=0
    )
    swap_disk_mib: int = option(
        0, "disk space for KV of preempted sequences", unit="MiB", minimum=0
    )
    swap_folder: str = option("", "where that disk space is; empty: the system's temporary folder")
    speculation: str = option(
        "off",
        "draft the next tokens of sequences where that saves time; the tokens are the same. ngram: "
        "of a text that repeats itself; draft: of others, too, by draft_model; heads: by the "
        "model's own head, if it has one",
        choices=SPECULATION,
    )
    draft_model: str = option(
        "",
        "small model with the model's tokenizer that drafts, in the same process: a folder or hub "
        "id. Its KV lies in the same blocks, which get larger by it",
        unit="folder",
    )
    orphan_s: float = option(
        20.0,
        "how long sequences of streams with ids of events are kept for another router when theirs "
        "is gone, in a tenth of the blocks at most; 0: another router computes them again",
        unit="s",
        minimum=0.0,
        maximum=600.0,
    )

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a draft model that cannot be had or is not used."""
        WorkerOptions.__post_init__(self)
        check_drafting(self.speculation, self.draft_model)
        ranks = self.tensor_parallel * self.pipeline_parallel
        if self.speculation == "heads" and ranks > 1:
            raise InvalidArgument(
                "a model's own head drafts on one rank only: leave tensor_parallel and "
                "pipeline_parallel at 1, or take ngram",
                field="speculation",
            )
        if self.draft_model and ranks > 1:
            raise InvalidArgument(
                "a draft model runs beside a model on one rank only: leave tensor_parallel and "
                "pipeline_parallel at 1, or take speculation ngram",
                field="draft_model",
            )

    @property
    def policy(self) -> SchedulerPolicy:
        """The scheduler's, of options without open choices."""
        return SchedulerPolicy(
            max_sequences=self.max_running,
            token_budget=self.max_running + self.step_tokens,
            prefill_budget=self.step_tokens,
            target_step_s=self.inter_token_ms / 1000,
            limit=self.queue_limit,
            speculation=self.speculation,
        )
