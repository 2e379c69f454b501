"""Starts the router process: reads its configuration, wires its parts, serves until stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from baton.core.model import WorkerIdentity
from baton.router.config import RouterConfig
from baton.router.discovery import StaticDiscovery
from baton.router.exposure import warnings
from baton.router.fleet import Fleet
from baton.router.grpc_door import KeyInterceptor
from baton.router.http.app import HttpApp
from baton.router.http.door import HttpDoor
from baton.router.http.protocol import HttpLimits
from baton.router.http.server import serve_http
from baton.router.keys import KeyedDoor, OpenDoor
from baton.router.metrics import RouterMetrics
from baton.router.mover import Mover
from baton.router.pipeline import Pipeline
from baton.router.servicer import InferenceServicer
from baton.rpc import config as configuration
from baton.rpc import lifecycle, logs
from baton.rpc.channels import Channels
from baton.rpc.metrics import REGISTRY
from baton.rpc.server import ProcessServer, Service
from baton.v1 import inference_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = "baton.v1.Inference"
HTTP_GRACE_S = 1.0
READINESS_S = 1.0


async def serve(config: RouterConfig) -> int:
    """Runs until SIGTERM, then drains. Returns the exit code."""
    identity = WorkerIdentity("router", lifecycle.new_incarnation(), config.grpc_listen)
    logs.setup("router", config.log_level, config.log_json, incarnation=identity.incarnation)
    log.info("configuration: %s", configuration.describe(config))
    discovery = StaticDiscovery(
        {
            "tokenizer": config.tokenizers,
            "prefill": config.prefills,
            "decode": config.decodes,
            "detokenizer": config.detokenizers,
        }
    )
    for warning in warnings(
        config.faces,
        keys=bool(config.keys),
        tls=bool(config.public_tls_cert),
        tls_terminated=config.tls_terminated,
    ):
        log.warning("%s", warning)
    door = KeyedDoor(config.keys) if config.keys else OpenDoor()
    certificates = config.public_certificates()
    channels = Channels(config.certificates())
    fleet = Fleet(discovery, channels, identity)
    metrics = RouterMetrics()
    pipeline = Pipeline(fleet, config, metrics)
    servicer = InferenceServicer(pipeline, stall_timeout_s=config.stall_timeout_s)
    server = ProcessServer(
        listen=config.grpc_listen,
        services=[
            Service(
                SERVICE,
                lambda grpc_server: inference_pb2_grpc.add_InferenceServicer_to_server(
                    servicer, grpc_server
                ),
            )
        ],
        reflection=config.reflection,
        public=True,
        certificates=certificates,
        interceptors=[KeyInterceptor(door)],
        field="grpc_listen",
    )
    unwatch = metrics.watch(fleet, lambda: pipeline.num_requests)
    try:
        limits = HttpLimits(stall_timeout_s=config.stall_timeout_s)
        app = HttpApp(pipeline, REGISTRY, HttpDoor(door, open_metrics=config.metrics_open))
        http = await serve_http(app, config.http_listen, limits=limits, certificates=certificates)
        try:
            grpc_address = await server.start()
            fleet.start()
            watching = (
                asyncio.create_task(_tell_readiness(server, pipeline, fleet)),
                asyncio.create_task(Mover(fleet, metrics).run()),
                asyncio.create_task(door.run()),
            )
            started = {"role": "router", "http": http.address, "grpc": grpc_address}
            print(json.dumps(started), flush=True)
            try:
                return await lifecycle.run_until_stopped(
                    server, pipeline.drain, drain_timeout_s=config.drain_timeout_s
                )
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.wait(watching)
        finally:
            await pipeline.close()
            await http.close(HTTP_GRACE_S)
            await server.stop(0)
    finally:
        for stop in unwatch:
            stop()
        await fleet.close()
        await channels.close()


async def _tell_readiness(server: ProcessServer, pipeline: Pipeline, fleet: Fleet) -> None:
    """Health says what is true: SERVING while a request could be answered."""
    while True:
        server.set_serving(pipeline.ready())
        await fleet.changed.wait(READINESS_S)


def main() -> None:
    """The `baton-router` command."""
    config = configuration.load(RouterConfig, prog="baton-router")
    sys.exit(lifecycle.run(serve(config)))


if __name__ == "__main__":
    main()
