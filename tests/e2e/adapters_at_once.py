"""A hundred LoRA adapters, eight requests of each, all at once, while a decode worker is killed.

What comes of it is judged elsewhere: `test_adapter_parity.py` holds it against transformers,
`tests/clients/test_peft.py` against peft itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batonlm.client import AsyncClient, Retries
from tests.e2e.relay import Relay, until_it_comes_about
from tests.engine.adapters import save_adapter
from tests.engine.tiny_models import save_tiny_model

ARCH = "llama"
NAMES = tuple(f"a{index}" for index in range(100))
LENGTHS = (1, 5, 15, 16, 17, 31, 33, 40)
"""Of the prompts in tokens: one request of each adapter for each."""
KNOWN = 400
"""Token ids that the tiny tokenizer has."""
NEW = 8
"""Tokens of each answer."""
ALL_S = 1500.0
"""A bound for liveness: the last of all requests waits for the first."""
READY_MIB = "5"
"""Memory for about half of the adapters: the others wait in host memory until they are wanted."""

Found = dict[str, list[tuple[list[int], list[int]]]]
"""Prompts and answers by adapter."""


def save_all(folder: Path) -> dict[str, Path]:
    """The adapters by name: no two alike, of ranks 2 to 11."""
    return {
        name: save_adapter(ARCH, folder / name, seed=index, rank=2 + index % 10)
        for index, name in enumerate(NAMES, 1)
    }


@contextmanager
def serving(adapters: dict[str, Path], folder: Path) -> Iterator[Relay]:
    """One prefill worker and two decode workers. folder: is made, and has all that they write."""
    folder.mkdir(exist_ok=True)
    model = save_tiny_model(ARCH, folder / "tiny")
    given = [f"{name}={path}" for name, path in adapters.items()]
    running = Relay(
        folder,
        *("--model", str(model), "--decode", "2", "--kv-memory-mib", "64", "--prefer-split"),
        *("--adapter", *given),
        environment={
            "BATON_ADAPTER_MEMORY_MIB": READY_MIB,
            "BATON_ADAPTER_HOST_MIB": "64",
            # All requests are open at once.
            "BATON_MAX_REQUESTS": str(2 * len(NAMES) * len(LENGTHS)),
        },
    )
    try:
        yield running
    finally:
        running.close()


def ask_all(relay: Relay) -> Found:
    """Sends all requests at once, and kills the busiest decode worker in the middle of them. Again,
    until one is killed that streams were on."""
    draw = random.Random(3)
    prompts = {
        name: [[draw.randrange(3, KNOWN) for _ in range(length)] for length in LENGTHS]
        for name in NAMES
    }
    found: Found = {}

    async def ask(client: AsyncClient, name: str, prompt: list[int]) -> tuple[str, list[int]]:
        answer = client.generate(
            prompt,
            model=name,
            max_tokens=NEW,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
        )
        choices = (await answer.read()).choices
        return name, list(choices[0].token_ids)

    async def all_at_once() -> None:
        # The router's queue is bounded: what finds no room is told when to come again.
        retries = Retries(most=1000)
        address = relay.description["grpc"]
        async with AsyncClient(address, timeout_s=ALL_S, retries=retries) as client:
            running = {
                asyncio.ensure_future(ask(client, name, prompt)): prompt
                for name in NAMES
                for prompt in prompts[name]
            }
            waiting = set(running)
            while len(waiting) > len(running) // 2:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            relay.kill(await asyncio.to_thread(relay.busiest, "decode"))
            found.clear()
            for each, prompt in running.items():
                name, tokens = await each
                found.setdefault(name, []).append((prompt, tokens))

    def a_worker_was_lost() -> bool:
        relay.wait_for_all()
        before = relay.lost_attempts()
        asyncio.run(all_at_once())
        relay.wait_for_all()
        return relay.lost_attempts() > before

    until_it_comes_about(a_worker_was_lost, "streams lost their worker")
    assert all(len(answers) == len(LENGTHS) for answers in found.values())
    assert relay.metric(relay.router, "baton_kv_bytes_total") > 0, "nothing was handed over"
    return found
