"""Opens runner, scheduler and grammars for a worker's options, and reports progress of loading.

torch is imported only when a torch runner is opened, after the thread policy is set.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batonlm.core.errors import InvalidArgument
from batonlm.core.kvcache.block_pool import BlockPool
from batonlm.core.kvcache.cache_events import OnChange
from batonlm.core.request.model import ModelDescription
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.engine.config import MIB, EngineConfig, configure_threads
from batonlm.engine.ranks.machines import Elsewhere, Launcher, RankMachines
from batonlm.engine.ranks.processes import RankProcesses
from batonlm.engine.ranks.runner import RankedRunner, Ranks
from batonlm.engine.ranks.tcp import key_of
from batonlm.grammar.book import GrammarBook
from batonlm.grammar.compiler import load_vocabulary
from batonlm.rpc.address import split
from batonlm.rpc.model_folder import check_same_tokenizer, special_tokens, tokenizer_digest
from batonlm.rpc.server import PARENT_VARIABLE
from batonlm.worker.options import LEADER_VARIABLE, DecodeConfig, WorkerOptions
from batonlm.worker.placement import RayLauncher

log = logging.getLogger(__name__)

Loading = Callable[[int, int], None]
"""Called as loading(loaded bytes, total bytes)."""

OpenRunner = Callable[[WorkerOptions, Loading], ModelRunner]
"""Opens a worker's runner, on the engine's thread. `open_runner` is the real one."""

_OPTION_NAMES = {
    "kv_memory_bytes": "kv_memory_mib",
    "adapter_memory_bytes": "adapter_memory_mib",
    "adapter_host_bytes": "adapter_host_mib",
    "prefix_host_bytes": "prefix_host_mib",
    "swap_host_bytes": "swap_host_mib",
    "swap_disk_bytes": "swap_disk_mib",
    "max_batch": "max_running",
    "max_step_tokens": "step_tokens",
    "heads": "speculation",
}
"""The worker's options by the engine's fields, for error messages."""


def open_runner(
    options: WorkerOptions,
    loading: Loading = lambda done, total: None,
    *,
    own_process: bool = True,
) -> ModelRunner:
    """Loads the model. Takes seconds to minutes. Raises InvalidArgument with a readable reason.

    loading: called with the progress, besides the process's own report. own_process: False where
    the engine is a guest of a program that has imported torch already: then how threads wait cannot
    be chosen any more, see `configure_threads`.
    """
    folder = Path(options.model)
    digest = tokenizer_digest(folder) if folder.is_dir() else ""
    try:
        config = engine_config(options, digest)
        if config.draft_model:
            check_same_tokenizer(folder, Path(config.draft_model))
        if options.tensor_parallel * options.pipeline_parallel > 1:
            return _open_ranks(options, config, _to_all(loading, _loading()))
        if own_process or "torch" not in sys.modules:
            configure_threads(options.threads)
        from batonlm.engine.footprint import foresee
        from batonlm.engine.runner import TorchRunner

        # A model that cannot fit is refused before gigabytes are read.
        foresee(config)
        return TorchRunner.load(config, progress=_to_all(loading, _loading()))
    except InvalidArgument as error:
        if error.field not in _OPTION_NAMES:
            raise
        raise InvalidArgument(error.message, field=_OPTION_NAMES[error.field]) from error


def _open_ranks(options: WorkerOptions, config: EngineConfig, progress: Loading) -> ModelRunner:
    """Opens the ranks as processes. This process computes nothing itself, and loads no torch."""
    tensor, stages = options.tensor_parallel, options.pipeline_parallel
    ranks_here = tensor * stages // options.machines
    threads = max(1, (options.threads or len(os.sched_getaffinity(0))) // ranks_here)
    spin = bool(options.threads)
    ranks: Ranks
    if options.machines == 1:
        ranks = RankProcesses(tensor, threads, stages=stages, spin=spin)
    else:
        token, group = options.ranks_token, os.environ.get(LEADER_VARIABLE, "")
        launcher: Launcher = Elsewhere()
        if options.ray_address:
            token, group = token or secrets.token_hex(32), ""
            launcher = RayLauncher(options.ray_address, token, options.device)
        ranks = RankMachines(
            tensor,
            threads,
            stages=stages,
            machines=options.machines,
            listen=split(options.ranks_listen, "ranks_listen"),
            key=key_of(token, group),
            launcher=launcher,
            spin=spin,
        )
    return RankedRunner.open(ranks, replace(config, threads=threads), progress)


def engine_config(options: WorkerOptions, tokenizer_digest: str = "") -> EngineConfig:
    """The engine's part of a worker's options. Raises InvalidArgument."""
    config = EngineConfig(
        model=options.model,
        model_name=options.model_name,
        dtype=options.dtype,
        device=options.device,
        block_size=options.block_size,
        kv_memory_bytes=options.kv_memory_mib * MIB,
        memory_share=options.memory_share,
        adapter_memory_bytes=options.adapter_mib * MIB,
        adapter_host_bytes=options.adapter_host_mib * MIB,
        prefix_host_bytes=options.prefix_host_mib * MIB,
        max_model_len=options.max_model_len,
        max_batch=options.max_running,
        # A decode step carries a token of every running sequence beside the prompts' tokens.
        max_step_tokens=options.step_tokens + options.max_running,
        exact=None if options.exact else False,
        threads=options.threads,
        quantize=options.quantize,
        graphs=options.graphs,
        decoder=options.decoder,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_wire_dtype=options.kv_wire_dtype,
        tokenizer_digest=tokenizer_digest,
    )
    if not isinstance(options, DecodeConfig):
        return config
    return replace(
        config,
        swap_host_bytes=options.swap_host_mib * MIB,
        swap_disk_bytes=options.swap_disk_mib * MIB,
        swap_folder=options.swap_folder,
        draft_model=options.draft_model,
        heads=options.speculation == "heads",
    )


def engine_loop(
    runner: ModelRunner,
    policy: SchedulerPolicy,
    report: OnChange = lambda change: None,
) -> EngineLoop:
    """A runner with a scheduler and a pool of its own. report: called with every change of the
    prefix cache."""
    pool = BlockPool(
        runner.num_blocks,
        runner.block_size,
        report,
        state_positions=runner.layout.state_positions,
        stepwise=getattr(runner, "stepwise", False),
    )
    scheduler = Scheduler(
        pool,
        policy,
        runner.model,
        num_swap_blocks=runner.num_swap_blocks,
        draft_model=getattr(runner, "draft_model", None),
    )
    return EngineLoop(runner, scheduler)


def open_book(options: WorkerOptions, model: ModelDescription) -> GrammarBook:
    """The worker's GrammarBook. May take a second. Without a tokenizer in the model's folder it
    refuses all grammars."""
    folder = Path(options.model)
    if not (folder / "tokenizer.json").is_file():
        return GrammarBook(None)
    try:
        tokenizer = load_vocabulary(
            folder,
            special=special_tokens(folder).values(),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
    except InvalidArgument as error:
        log.warning("%s; requests for structured output will be refused", error.message)
        return GrammarBook(None)
    return GrammarBook(tokenizer)


def is_exact(runner: ModelRunner) -> bool:
    """Whether a runner's tokens are independent of the rest of the batch."""
    return bool(getattr(runner, "exact", True))


def _to_all(*listeners: Loading) -> Loading:
    def report(done: int, total: int) -> None:
        for listener in listeners:
            listener(done, total)

    return report


def _loading() -> Loading:
    """Reports progress: to a supervisor as JSON lines on stdout, on a terminal as a bar on stderr,
    otherwise only in the log.
    """
    if os.environ.get(PARENT_VARIABLE):
        return lambda done, total: print(
            json.dumps({"loading": done, "total": total}), file=sys.stdout, flush=True
        )
    return _bar() if sys.stderr.isatty() else _to_all()


def _bar() -> Loading:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
    task = progress.add_task("weights", total=None)

    def show(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=done, total=total)
        if done >= total:
            progress.stop()

    return show
