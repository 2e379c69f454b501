"""Starts the router process: reads its configuration, connects its parts, serves until stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from starlette.types import ASGIApp

from batonlm.core.request.model import WorkerIdentity
from batonlm.core.routing.aliases import Alias
from batonlm.core.routing.aliases import parse as parse_aliases
from batonlm.core.routing.rebalance import Rebalancer
from batonlm.router.api.access import (
    Authenticator,
    KeyAuthenticator,
    OpenAuthenticator,
    exposure_warnings,
)
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.adapters import RouterAdaptersServicer
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.router.api.http.access import HttpAccess
from batonlm.router.api.http.app import HttpApp, playground_routes, running_route, with_cors
from batonlm.router.api.http.connections import HttpLimits
from batonlm.router.api.http.server import HttpServer, serve_http
from batonlm.router.api.vllm import engine_service
from batonlm.router.config import RouterConfig
from batonlm.router.observe import gauges
from batonlm.router.observe.metrics import RouterMetrics
from batonlm.router.observe.records import UsageLog
from batonlm.router.processes import OwnProcess, cores, run_processes
from batonlm.router.request import pacing
from batonlm.router.request.migration import Migrator
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.request.response_store import MemoryStore, ResponseStore, SqliteStore
from batonlm.router.workers.discovery import Replicas, discovery_of
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc import config as configuration
from batonlm.rpc import lifecycle, logs
from batonlm.rpc.address import AllowedHosts, is_loopback, split
from batonlm.rpc.channels import Channels
from batonlm.rpc.followed_file import FollowedFile
from batonlm.rpc.loop import freeze_garbage
from batonlm.rpc.metrics import REGISTRY, tell_role
from batonlm.rpc.server import (
    PARENT_VARIABLE,
    PUBLIC_STREAMS,
    Probes,
    ProcessServer,
    PublicLimits,
)

log = logging.getLogger(__name__)

HTTP_GRACE_S = 1.0
RESPONSES = "responses.sqlite"
"""The store of responses of several processes, in their folder."""
READINESS_S = 1.0


async def serve(config: RouterConfig, own: OwnProcess | None = None) -> int:
    """Runs until SIGTERM, then drains. Returns the exit code. own: set when this process is one of
    several of a router."""
    identity = WorkerIdentity("router", lifecycle.new_instance_id(), config.grpc_listen)
    logs.setup("router", config.log_level, config.log_json, instance_id=identity.instance_id)
    log.info("configuration: %s", configuration.describe(config))
    tell_role("router")
    probes = Probes(health_listen=config.health_listen, metrics_listen=config.metrics_listen)
    if own is not None:
        # The parts of the start are the first process's to print.
        os.environ.pop(PARENT_VARIABLE, None)
        await own.open(probes.health)
    await probes.open()
    probes.startup.enter("discovery")
    discovery = await discovery_of(config.places)
    replicas = Replicas(discovery if config.routers else None, own.count if own else 1)
    for warning in exposure_warnings(
        config.faces,
        keys=bool(config.keys),
        tls=bool(config.public_tls_cert),
        tls_terminated=config.tls_terminated,
    ):
        log.warning("%s", warning)
    authenticator = _authenticator(config, config.http_listen)
    grpc_access = authenticator if config.keys else _authenticator(config, config.grpc_listen)
    certificates = config.public_certificates()
    channels = Channels(config.certificates(), token=config.peer_token)
    fleet = Fleet(discovery, channels, identity)
    metrics = RouterMetrics()
    tracer = config.tracer("router", identity.instance_id)
    usage = UsageLog(config.usage_log, identity.instance_id) if config.usage_log else None
    store = _response_store(config, own)
    aliases = AliasFile(config) if config.aliases else None
    now = partial(aliases.now, fleet.adapters.knows) if aliases is not None else None
    pipeline = Pipeline(fleet, config, metrics, replicas.live_replicas, tracer, usage, now)
    services = [
        InferenceServicer(pipeline, stall_timeout_s=config.stall_timeout_s).service(),
        RouterAdaptersServicer(pipeline).service(),
    ]
    if own is not None:
        own.pipeline = pipeline
    if config.vllm_engine:
        services.append(engine_service(pipeline, fleet, config))
    server = ProcessServer(
        listen=config.grpc_listen,
        services=services,
        probes=probes,
        public=True,
        certificates=certificates,
        interceptors=[KeyInterceptor(grpc_access, web_pages=bool(config.keys))],
        limits=PublicLimits(
            max_connections=config.max_connections,
            max_age_s=config.connection_max_age_s,
            # A gateway uses one connection for all its users; at a small limit, calls that wait for
            # others would delay its aborts.
            streams=PUBLIC_STREAMS + (config.max_requests if config.vllm_engine else 0),
        ),
        field="grpc_listen",
        claimed=own is not None,
    )
    unwatch = gauges.watch(pipeline, fleet, config, metrics, replicas, store)
    try:
        limits = HttpLimits(
            max_connections=config.max_connections,
            max_per_address=config.max_connections_per_address,
            stall_timeout_s=config.stall_timeout_s,
            max_age_s=config.connection_max_age_s,
        )
        pages = playground_routes() if config.playground else [running_route()]
        http_access = HttpAccess(
            authenticator,
            pages=[page.path for page in pages],
            token=config.peer_token,
            hosts=None if config.keys else AllowedHosts(config.http_listen, config.allowed_hosts),
        )
        app: ASGIApp = HttpApp(pipeline, REGISTRY, http_access, pages, own, store)
        if config.cors_origins:
            app = with_cors(app, config.cors_origins)
        http = await serve_http(
            app,
            config.http_listen,
            limits=limits,
            certificates=certificates,
            shared=own is not None,
        )
        try:
            grpc_address = await server.start()
            probes.startup.enter("workers")
            fleet.start()
            now_s = asyncio.get_running_loop().time()
            rebalancer = Rebalancer(config.rebalancing, identity.instance_id, now_s)
            dispatcher = pipeline.gate.dispatcher
            migrator = Migrator(fleet, metrics, rebalancer, lambda: dispatcher.newcomer)
            watching = (
                asyncio.create_task(_tell_readiness(server, pipeline, fleet)),
                asyncio.create_task(migrator.run()),
                asyncio.create_task(pipeline.adapter_manager.keep()),
                asyncio.create_task(authenticator.run()),
                *([asyncio.create_task(aliases.run())] if aliases is not None else []),
                asyncio.create_task(replicas.run()),
                asyncio.create_task(pacing.keep(pipeline.services.load)),
            )
            started = {"role": "router", "http": http.address, "grpc": grpc_address}
            freeze_garbage()
            if own is None:
                print(json.dumps(started), flush=True)
            try:
                goodbye_s = server.goodbye_s if config.lame_duck_s else 0.0
                return await lifecycle.run_until_stopped(
                    server,
                    lambda: leave(pipeline, http, server, config.lame_duck_s),
                    drain_timeout_s=config.lame_duck_s + goodbye_s + config.drain_timeout_s,
                    cut=pipeline.cut,
                )
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.wait(watching)
        finally:
            await pipeline.close()
            await http.close(HTTP_GRACE_S)
            await server.stop(0)
            await store.close()
            if usage is not None:
                await asyncio.to_thread(usage.close)
    finally:
        for stop in unwatch:
            stop()
        await fleet.close()
        await channels.close()
        tracer.close()
        if own is not None:
            own.close()


def _response_store(config: RouterConfig, own: OwnProcess | None) -> ResponseStore:
    """Raises InvalidArgument naming the option."""
    path = config.responses_file
    if not path and own is not None and own.count > 1:
        # A client's next request may reach another process. This file ends with the first one.
        path = f"{own.folder}/{RESPONSES}"
    limits = config.responses
    return SqliteStore(path, limits) if path and limits.max_bytes else MemoryStore(limits)


class AliasFile(FollowedFile[dict[str, Alias]]):
    """The names that stand for models, as the operator's file says now."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises InvalidArgument naming the option."""
        own = config.own_aliases
        super().__init__(
            config.aliases, lambda text: own | parse_aliases(text), "aliases", "aliases"
        )
        self._in_force = self._refused = self.value

    def now(self, is_adapter: Callable[[str], bool]) -> dict[str, Alias]:
        """A file that has an adapter's name is not taken over while there is that adapter."""
        value = self.value
        if value is self._in_force:
            return value
        taken = next((name for name in value if is_adapter(name)), None)
        if taken is None:
            self._in_force = value
        elif value is not self._refused:
            self._refused = value
            log.error(
                "the file of aliases cannot be used, the former aliases stay: aliases.%s is the "
                "name of an adapter",
                taken,
            )
        return self._in_force


def _authenticator(config: RouterConfig, listen: str) -> Authenticator:
    """listen: the address that callers reach."""
    if config.keys:
        return KeyAuthenticator(config.keys)
    return OpenAuthenticator(public=not is_loopback(split(listen, "listen")[0]))


async def _tell_readiness(server: ProcessServer, pipeline: Pipeline, fleet: Fleet) -> None:
    """Updates the health status: SERVING while a request could be answered."""
    while True:
        server.set_serving(pipeline.ready())
        await fleet.changed.wait(READINESS_S)


async def leave(
    pipeline: Pipeline, http: HttpServer, server: ProcessServer, lame_duck_s: float
) -> None:
    """Shuts down without losing a request. Returns when no request is left.

    From SIGTERM on the router is not ready. It still accepts requests for lame_duck_s, because
    clients may not have noticed yet; over HTTP each answer is then its connection's last. After
    that new gRPC connections are refused, and each open one gets a GOAWAY as it ages, so that no
    call reaches a server that is gone (decision 028). Idle HTTP connections end next, and a new
    request is refused with the advice to retry at another router. What still runs after
    drain_timeout_s ends with a retryable error (`Pipeline.cut`).

    lame_duck_s: 0 where there is no other router; then the phase is skipped.
    """
    pipeline.leave()
    http.leave()
    if lame_duck_s:
        await asyncio.sleep(lame_duck_s)
        await server.send_away()
    http.end_idle()
    await pipeline.drain()


def yield_on_one_core() -> None:
    """Keeps the threads of a process on one core from interrupting each other.

    Call it before threads start, because they inherit the policy. A gRPC thread wakes for every
    message that is written. On the writer's own core the kernel would run it at once, at two
    context switches per message; under SCHED_BATCH it waits until the writer is idle and then
    handles all messages. With several cores it runs beside the writer.
    """
    if hasattr(os, "SCHED_BATCH") and len(os.sched_getaffinity(0)) == 1:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """The `baton-router` command."""
    config = configuration.load(RouterConfig, prog="baton-router")
    own = OwnProcess.here()
    if own is not None:
        config = own.config(config)
    elif (count := config.processes or cores()) > 1:
        sys.exit(lifecycle.run(run_processes(config, count)))
    yield_on_one_core()
    sys.exit(lifecycle.run(serve(config, own)))


if __name__ == "__main__":
    main()
