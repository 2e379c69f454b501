"""Assembles a prefill or decode worker and runs it from start to exit.

The worker listens only when all its parts are ready; while it loads, only health and metrics
answer. SIGTERM drains it. A dead engine thread ends the process at once, because its memory is in
an unknown state. A staging pool with too many orphaned buffers drains the worker too, with a
separate exit code.

Orphaned transfers get the rest of the drain's time to end: if this process ended first, UCX would
abort a frozen peer that wakes up with a read of this worker pending. If one does not end, the
process exits without teardown.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from batonlm.core.errors import Internal, InvalidArgument
from batonlm.core.kvcache.cache_events import CacheLog, Change
from batonlm.core.request.model import WorkerIdentity
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.core.scheduler.policy import SchedulerPolicy
from batonlm.engine.ranks.runner import RankedRunner
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.rpc import config as configuration
from batonlm.rpc import metrics
from batonlm.rpc.address import check_listen, claimed, is_loopback, split
from batonlm.rpc.channels import Channels
from batonlm.rpc.lifecycle import exit_at_once, new_instance_id, run_until_stopped
from batonlm.rpc.logs import setup
from batonlm.rpc.loop import freeze_garbage
from batonlm.rpc.server import ProcessServer, Service
from batonlm.rpc.tracing import Tracer
from batonlm.rpc.worker import worker_service
from batonlm.transfer.peers import SenderConnection
from batonlm.transfer.receiver import KvReceiver
from batonlm.transfer.sender import KvSender
from batonlm.transfer.staging import NO_FAULTS, Faults
from batonlm.transfer.stats import HandoverStats
from batonlm.transfer.transports import Staging
from batonlm.transfer.ucx import KvNetwork, Ucx, choose, inherited
from batonlm.v1.handover_pb2_grpc import add_HandoverServicer_to_server
from batonlm.worker.adapters import AdapterFolder, AdaptersServicer, WorkerAdapters
from batonlm.worker.engine import OpenRunner, engine_loop, open_book, open_runner
from batonlm.worker.hardware import Settled, settled
from batonlm.worker.options import WorkerOptions
from batonlm.worker.report import WorkerReport, count_step, describe, export_handovers
from batonlm.worker.service import AttemptService
from batonlm.worker.staging import open_staging
from batonlm.worker.tiers.prefix_tiers import PrefixTiers, open_tiers


def ucx_of(options: WorkerOptions) -> Ucx:
    """The UCX settings of this worker. Raises InvalidArgument naming the invalid option."""
    if options.transport == "loopback":
        return Ucx()
    reached = [
        split(address, field)[0]
        for address, field in ((options.listen, "listen"), (options.advertise, "advertise"))
        if address
    ]
    return choose(
        network_of(options.kv_network, reached),
        transports=options.ucx_transports,
        devices=options.ucx_devices,
        inherited=inherited(),
    )


def network_of(declared: str, hosts: Sequence[str]) -> KvNetwork:
    """The declared network; for "auto", this machine, if all of `hosts` are loopback.

    Raises InvalidArgument otherwise: hand-overs would use a network on which others can read this
    process's memory, or would all fail.
    """
    if declared != "auto":
        return KvNetwork(declared)
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond:
        raise InvalidArgument(
            f"must be declared, because {beyond[0]} is reached from other machines: isolated when "
            "only Baton's workers reach the network that KV moves on, trusted when everybody on it "
            "is trusted with this process's memory, local to hand over on this machine only",
            field="kv_network",
        )
    return KvNetwork.LOCAL


PROBE_INTERVAL_S = 10.0
"""Seconds between two probes of a path for KV on which nothing moves. A path that breaks unused is
found before most requests need it, and a probe moves one KV chunk."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts from which a role's service is made."""

    engine: EngineThread
    runner: ModelRunner
    identity: WorkerIdentity
    staging: Staging
    sender: KvSender
    receiver: KvReceiver
    grammars: GrammarBook
    tiers: PrefixTiers | None
    """None where the prefix cache has none behind it."""
    tracer: Tracer


MakeService = Callable[[WorkerParts], tuple[AttemptService[Any], Service]]
"""Makes a role's service and its gRPC service."""


async def run_worker(
    role: str,
    options: WorkerOptions,
    make_policy: Callable[[WorkerOptions], SchedulerPolicy],
    make_service: MakeService,
    open_runner: OpenRunner = open_runner,
    faults: Faults = NO_FAULTS,
) -> int:
    """Runs the worker until it is stopped. Returns the exit code.

    make_policy: the scheduler's, of options without open choices. open_runner, faults: replaced by
    tests and experiments, see `batonlm.testing.worker`.
    """
    with ExitStack() as ends:
        any_port = split(options.listen, "listen")[1] == 0
        if any_port:
            # Peers need the port before the server exists. A given one may have connections in
            # TIME_WAIT, where a claim keeps nobody out: the server binds that without sharing it.
            listen, _ = ends.enter_context(claimed(options.listen, "listen"))
            options = replace(options, listen=listen)
        else:
            check_listen(options.listen, "listen")
        options = await asyncio.to_thread(options.with_model, ends)
        chosen = ends.enter_context(settled(role, options))
        policy = make_policy(chosen.options)
        return await _run_settled(role, chosen, policy, make_service, open_runner, faults, any_port)


async def _run_settled(
    role: str,
    chosen: Settled,
    policy: SchedulerPolicy,
    make_service: MakeService,
    open_runner: OpenRunner,
    faults: Faults,
    port_claimed: bool,
) -> int:
    side = "sender" if role == "prefill" else "receiver"
    options = chosen.options
    address = _advertised(options)
    ucx = ucx_of(options)
    instance_id = new_instance_id()
    setup(role, options.log_level, options.log_json, instance_id=instance_id)
    log.info("%s", chosen.why)
    log.info("configuration: %s", configuration.describe(options))
    service: AttemptService[Any] | None = None
    tiers: PrefixTiers | None = None
    made: list[EngineLoop] = []
    # The engine thread appends and this thread removes; nothing else of the pool is shared.
    changes: deque[Change] = deque()
    cache = CacheLog(changes)

    def make_loop() -> EngineLoop:
        runner = open_runner(options, probes.startup.weights)
        made.append(engine_loop(runner, policy, changes.append))
        return made[0]

    def deliver(events: list[Event]) -> None:
        # Only steps cache blocks, and each such step has events.
        cache.collect()
        if service is not None:
            service.deliver(events)
        if tiers is not None:
            tiers.stepped()

    probes = options.probes()
    async with AsyncExitStack() as ends:
        tracer = options.tracer(role, instance_id)
        ends.callback(tracer.close)
        await ends.enter_async_context(probes)
        certificates = options.certificates()
        channels = Channels(certificates, token=options.peer_token)
        ends.push_async_callback(channels.close)
        metrics.tell_role(role)
        engine: EngineThread = EngineThread(make_loop, deliver, on_step=count_step)
        probes.startup.enter("engine")
        await engine.start()
        freeze_garbage()
        ends.push_async_callback(engine.stop)
        runner, scheduler = made[0].runner, made[0].scheduler
        adapters = WorkerAdapters(
            engine,
            runner,
            AdapterFolder(options.adapters_folder, options.cache_folder / "adapters"),
            on_use=options.adapters_on_use,
        )
        await adapters.load_given(options.adapters)
        probes.startup.enter("ring")
        identity = WorkerIdentity(role, instance_id, address)
        received, sent = HandoverStats(), HandoverStats()
        staging, self_test = await open_staging(
            options, ucx, engine, runner, identity, received, ends,
            probe_interval_s=PROBE_INTERVAL_S, faults=faults,
        )  # fmt: skip
        grammars = await asyncio.to_thread(open_book, options, runner.model)
        ends.callback(grammars.close)
        sender = KvSender(identity, runner.layout, staging, stats=sent)
        receiver = KvReceiver(
            identity,
            runner.layout,
            staging,
            lambda peer: SenderConnection(channels.get(peer.address, peer.role)),
            stats=received,
        )
        receiver.start_probing(PROBE_INTERVAL_S)
        tiers = await open_tiers(options, engine, runner, lambda: scheduler.speed, cache)
        service, served = make_service(
            WorkerParts(
                engine, runner, identity, staging, sender, receiver, grammars, tiers, tracer
            )
        )
        ends.push_async_callback(service.close)
        report = WorkerReport(
            *(engine, staging, received, side, runner.num_blocks, scheduler, service, self_test),
            tiers,
        )
        export_handovers("sender", sent)
        export_handovers("receiver", received)
        report.export()
        report.export_aliases(runner.model.name, runner.block_size)
        metrics.gauge(metrics.ADAPTERS, lambda: {(): len(adapters.held.adapters)})
        description = describe(
            runner, identity, staging.names, options.max_running, options.standby
        )
        server = ProcessServer(
            listen=options.listen,
            services=[
                served,
                Service(
                    "baton.v1.Handover",
                    lambda server: add_HandoverServicer_to_server(sender, server),
                ),
                worker_service(
                    lambda: description,
                    report.worker_load,
                    cache,
                    service.use_through,
                    lambda: adapters.held,
                    {} if tiers is None else tiers.logs,
                ),
                AdaptersServicer(adapters).service(),
            ],
            probes=probes,
            certificates=certificates,
            token=options.peer_token,
            claimed=port_claimed,
        )
        listening = await server.start()
        server.set_serving(True)
        self_test.watch(lambda: service.num_attempts == 0, server.set_serving)
        ends.push_async_callback(self_test.close)
        log.info(
            "%s serves %s at %s: %d blocks of %d positions, KV over %s",
            role, runner.model.name, listening, runner.num_blocks, runner.block_size,
            " or ".join(staging.names),
        )  # fmt: skip
        fatal = _fatal(engine, runner)
        announcement = {"role": role, "listen": listening, "metrics": server.metrics_address}
        print(json.dumps(announcement), flush=True)

        exhausted = asyncio.create_task(_exhausted(staging))
        ends.callback(exhausted.cancel)

        async def drain() -> None:
            self_test.stop()
            await service.drain()
            await staging.ring.no_orphaned.wait()

        code = await run_until_stopped(
            server,
            drain,
            drain_timeout_s=options.drain_timeout_s,
            fatal=fatal,
            exhausted=exhausted,
        )
    if not staging.quiet:
        exit_at_once(code)
    return code


def _advertised(options: WorkerOptions) -> str:
    """The address for peers. Raises InvalidArgument when it cannot be derived from `listen`."""
    host, _ = split(options.listen, "listen")
    if not options.advertise and host in ("0.0.0.0", "::"):
        raise InvalidArgument(
            f"must be set, because peers cannot connect to {host}", field="advertise"
        )
    return options.advertise or options.listen


async def _exhausted(staging: Staging) -> str:
    """Returns, with the reason, when too many buffers are orphaned."""
    await staging.ring.exhausted_event.wait()
    return "too many buffers are orphaned"


def _fatal(engine: EngineThread, runner: ModelRunner) -> asyncio.Future[None]:
    """A future that fails when the engine thread or a rank dies, even while no step runs."""
    loop = asyncio.get_running_loop()
    fatal: asyncio.Future[None] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not fatal.done():
            fatal.set_exception(error)

    def rank_died() -> None:
        # The loop is closed when the process is ending already.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(fail, Internal("a rank has died"))

    engine.failed.add_done_callback(lambda died: None if died.cancelled() else fail(died.result()))
    if isinstance(runner, RankedRunner):
        runner.on_death(rank_died)
    return fatal
