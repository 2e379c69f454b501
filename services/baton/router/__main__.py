"""Starts the router process: reads its configuration, wires its parts, serves until stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from baton.core.request.model import WorkerIdentity
from baton.router import one_core
from baton.router.api.access import Authenticator, KeyAuthenticator, OpenAuthenticator, warnings
from baton.router.api.grpc.access import KeyInterceptor
from baton.router.api.grpc.inference import InferenceServicer
from baton.router.api.http.access import HttpAccess
from baton.router.api.http.app import HttpApp, playground_routes
from baton.router.api.http.connections import HttpLimits
from baton.router.api.http.server import serve_http
from baton.router.api.vllm import engine_service
from baton.router.config import RouterConfig
from baton.router.leaving import Leaving
from baton.router.observe import aliases
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.usage_log import UsageLog
from baton.router.request import pacing
from baton.router.request.migration import Migrator
from baton.router.request.pipeline import Pipeline
from baton.router.workers.fleet import Fleet
from baton.router.workers.replicas import Replicas
from baton.router.workers.sources import discovery_of
from baton.rpc import config as configuration
from baton.rpc import garbage, lifecycle, logs
from baton.rpc.address import is_loopback, split
from baton.rpc.channels import Channels
from baton.rpc.hosts import AllowedHosts
from baton.rpc.metrics import REGISTRY, tell_role
from baton.rpc.options import PUBLIC_STREAMS, PublicLimits
from baton.rpc.probes import Probes
from baton.rpc.server import ProcessServer

log = logging.getLogger(__name__)

HTTP_GRACE_S = 1.0
READINESS_S = 1.0


async def serve(config: RouterConfig) -> int:
    """Runs until SIGTERM, then drains. Returns the exit code."""
    identity = WorkerIdentity("router", lifecycle.new_instance_id(), config.grpc_listen)
    logs.setup("router", config.log_level, config.log_json, instance_id=identity.instance_id)
    log.info("configuration: %s", configuration.describe(config))
    tell_role("router")
    probes = Probes(health_listen=config.health_listen, metrics_listen=config.metrics_listen)
    await probes.open()
    probes.startup.enter("discovery")
    discovery = await discovery_of(config)
    replicas = Replicas(discovery if config.routers else None, config.replicas)
    for warning in warnings(
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
    fleet = Fleet(discovery, channels, identity, index_entries=config.index_entries)
    metrics = RouterMetrics(gen_ai=config.gen_ai_metrics, vllm=config.vllm_aliases)
    tracer = config.tracer("router", identity.instance_id)
    usage = UsageLog(config.usage_log, identity.instance_id) if config.usage_log else None
    pipeline = Pipeline(fleet, config, metrics, replicas.live_replicas, tracer, usage)
    services = [InferenceServicer(pipeline, stall_timeout_s=config.stall_timeout_s).service()]
    if config.vllm_engine:
        services.append(engine_service(pipeline, fleet, config))
    server = ProcessServer(
        listen=config.grpc_listen,
        services=services,
        reflection=config.reflection,
        probes=probes,
        public=True,
        certificates=certificates,
        interceptors=[KeyInterceptor(grpc_access, web_pages=bool(config.keys))],
        limits=PublicLimits(
            max_connections=config.max_connections,
            idle_s=config.connection_idle_s,
            max_age_s=config.connection_max_age_s,
            handshake_s=config.head_timeout_s,
            # A gateway has one connection for all its users, and calls that wait for others to end
            # would keep its aborts waiting.
            streams=PUBLIC_STREAMS + (config.max_requests if config.vllm_engine else 0),
        ),
        field="grpc_listen",
    )
    unwatch = metrics.watch(fleet, replicas, lambda: pipeline.num_requests)
    unwatch += metrics.watch_gate(pipeline.gate)
    unwatch += metrics.watch_leaks(lambda: pipeline.num_requests, lambda: pipeline.held)
    unwatch += metrics.watch_targets(config, fleet, pipeline.gate.queue, replicas)
    if config.vllm_aliases:
        unwatch += aliases.watch(pipeline, fleet)
    try:
        limits = HttpLimits(
            max_connections=config.max_connections,
            max_per_address=config.max_connections_per_address,
            head_timeout_s=config.head_timeout_s,
            body_timeout_s=config.body_timeout_s,
            body_bytes_per_s=config.body_bytes_per_s,
            stall_timeout_s=config.stall_timeout_s,
            keep_alive_s=config.connection_idle_s,
            max_age_s=config.connection_max_age_s,
        )
        pages = playground_routes() if config.playground else []
        http_access = HttpAccess(
            authenticator,
            open_metrics=config.metrics_open,
            pages=[page.path for page in pages],
            token=config.peer_token,
            hosts=None if config.keys else AllowedHosts(config.http_listen, config.allowed_hosts),
        )
        app = HttpApp(pipeline, REGISTRY, http_access, pages)
        http = await serve_http(app, config.http_listen, limits=limits, certificates=certificates)
        try:
            grpc_address = await server.start()
            probes.startup.enter("workers")
            fleet.start()
            watching = (
                asyncio.create_task(_tell_readiness(server, pipeline, fleet)),
                asyncio.create_task(Migrator(fleet, metrics).run()),
                asyncio.create_task(authenticator.run()),
                asyncio.create_task(replicas.run()),
                asyncio.create_task(pacing.keep(pipeline.pace)),
            )
            started = {"role": "router", "http": http.address, "grpc": grpc_address}
            garbage.settle()
            print(json.dumps(started), flush=True)
            try:
                leaving = Leaving(pipeline, http, server, config)
                return await lifecycle.run_until_stopped(
                    server, leaving.run, drain_timeout_s=leaving.longest_s, cut=pipeline.cut
                )
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.wait(watching)
        finally:
            await pipeline.close()
            await http.close(HTTP_GRACE_S)
            await server.stop(0)
            if usage is not None:
                await asyncio.to_thread(usage.close)
    finally:
        for stop in unwatch:
            stop()
        await fleet.close()
        await channels.close()
        tracer.close()


def _authenticator(config: RouterConfig, listen: str) -> Authenticator:
    """listen: the address that callers reach."""
    if config.keys:
        return KeyAuthenticator(config.keys)
    return OpenAuthenticator(public=not is_loopback(split(listen, "listen")[0]))


async def _tell_readiness(server: ProcessServer, pipeline: Pipeline, fleet: Fleet) -> None:
    """Health says what is true: SERVING while a request could be answered."""
    while True:
        server.set_serving(pipeline.ready())
        await fleet.changed.wait(READINESS_S)


def main() -> None:
    """The `baton-router` command."""
    config = configuration.load(RouterConfig, prog="baton-router")
    one_core.settle()
    sys.exit(lifecycle.run(serve(config)))


if __name__ == "__main__":
    main()
