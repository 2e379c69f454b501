"""What an endpoint picker reads of a router, against what really happens there."""

from __future__ import annotations

from prometheus_client.exposition import generate_latest

from batonlm.router.config import RouterConfig
from batonlm.router.observe.gauges import vllm_readers
from batonlm.rpc.metrics import gauge
from tests.services.router.conftest import World, until
from tests.services.router.test_admission import A, ask

READ = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
)


def told(world: World) -> dict[str, float]:
    """The series that an endpoint picker reads, as a scraper reads them."""
    lines = generate_latest(world.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(READ))
    return {name: float(value) for name, value in pairs}


async def test_the_names_and_values_that_an_endpoint_picker_reads(world: World) -> None:
    for free in (1000, 500):
        decode = world.new_decode()
        decode.max_sequences, decode.free_blocks = 1, free
        decode.stepping.clear()
        world.decodes.append(decode)
    await world.start(RouterConfig(local_prefill_tokens=0), decodes=0)
    assert world.fleet is not None
    readers = vllm_readers(world.pipeline, world.fleet)
    unwatch = [gauge(spec, read, world.registry) for spec, read in readers.items()]
    calm = {
        'vllm:num_requests_running{model_name="made-up"}': 0,
        'vllm:num_requests_waiting{model_name="made-up"}': 0,
        'vllm:kv_cache_usage_perc{model_name="made-up"}': 0.25,
        'vllm:cache_config_info{block_size="16",model_name="made-up",num_gpu_blocks="2000"}': 1,
    }
    assert told(world) == calm
    asked = ask(world, *[A] * 5)
    await until(lambda: len(world.pipeline.gate.queue) == 3)
    assert told(world) == calm | {
        'vllm:num_requests_running{model_name="made-up"}': 2,
        'vllm:num_requests_waiting{model_name="made-up"}': 3,
    }
    for decode in world.decodes:
        decode.stepping.set()
    for one in asked:
        await one
    await until(world.nothing_left)
    assert told(world) == calm
    for stop in unwatch:
        stop()
    assert told(world) == {}
