"""`vllm.grpc.engine.VllmEngine`: presents a whole Baton as one engine of a vLLM gateway.

In: messages of the package smg-grpc-proto, an optional part of the installation (`batonlm[vllm]`).
Out: core Requests; events as messages. Only this file may be imported without that package.
"""

from __future__ import annotations

from batonlm.core.errors import InvalidArgument, install
from batonlm.router.config import RouterConfig
from batonlm.router.request.pipeline import Pipeline
from batonlm.router.workers.fleet import Fleet
from batonlm.rpc.server import Service


def engine_service(pipeline: Pipeline, fleet: Fleet, config: RouterConfig) -> Service:
    """Returns the service for a ProcessServer. Raises InvalidArgument naming the option at
    fault."""
    try:
        import smg_grpc_proto  # noqa: F401
    except ImportError:
        raise InvalidArgument(
            f"needs the protocol's messages: {install('vllm')}", field="vllm_engine"
        ) from None
    from batonlm.router.api.vllm.engine import TokenizerArchive, VllmEngine
    from batonlm.router.observe.gauges import RouterUse

    files = TokenizerArchive.of(config.vllm_tokenizer) if config.vllm_tokenizer else None
    use = RouterUse(pipeline, fleet)
    return VllmEngine(pipeline, use, files, stall_timeout_s=config.stall_timeout_s).service()
