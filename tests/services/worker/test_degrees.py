"""Workers of unequal degree and block size, as real processes over NIXL: tokens equal
transformers', and decode is sent what it lacks and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batonlm.transfer import nixl
from batonlm.v1.decode_pb2_grpc import DecodeStub
from tests.engine.driving import random_prompts
from tests.engine.modes import attempt
from tests.engine.test_parity import expected
from tests.engine.tiny_models import VOCAB, save_tiny_model
from tests.services.worker.pair import new_id, until
from tests.services.worker.processes import Process, run_on, worker
from tests.services.worker.router_end import RouterEnd

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not nixl.available(), reason="no NIXL here"),
]

NEW = 6
POSITION_BYTES = 3 * 2 * 2 * 16 * 4
"""layers x (keys, values) x heads x elements x bytes"""

SMALL = ("--device", "cpu", "--kv-memory-mib", "8", "--swap-host-mib", "0", "--transport", "nixl")
TWO = ("--tensor-parallel", "2", "--threads", "2")
STAGED = ("--tensor-parallel", "2", "--pipeline-parallel", "2", "--threads", "4")
ONE = ("--threads", "1")
REAL: Any = {"runner": "torch", "start_s": 240}


def command(role: str, block_size: int, *ranks: str) -> tuple[str, tuple[str, ...]]:
    return f"batonlm.{role}", (*SMALL, "--block-size", str(block_size), *ranks)


@pytest.mark.parametrize(
    "prefill, decode, held",
    [
        pytest.param(command("prefill", 32, *STAGED), command("decode", 48, *TWO), 48, id="4-2"),
        pytest.param(
            command("prefill", 48, *ONE),
            command("decode", 32, *STAGED),
            64,
            id="1-4",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            command("prefill", 16, *TWO),
            command("decode", 48, *ONE),
            48,
            id="2-1",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_sequences_go_on_where_the_degree_is_another(
    prefill: tuple[str, tuple[str, ...]],
    decode: tuple[str, tuple[str, ...]],
    held: int,
    tmp_path: Path,
) -> None:
    """The last prompt begins with another one, of which decode holds `held` positions: whole
    blocks of its own, which end inside one of prefill's."""
    folder = save_tiny_model("llama", tmp_path / "m")
    prompts = random_prompts((5, 16, 130, 70), VOCAB)
    prompts.append(prompts[-1] + prompts[0])
    wanted = expected("llama", prompts, NEW)
    async with (
        worker(prefill[0], folder, *prefill[1], **REAL) as sender,
        worker(decode[0], folder, *decode[1], **REAL) as receiver,
    ):
        end = RouterEnd(DecodeStub(receiver.channel), receiver.identity, sender.identity)
        await end.connect()
        cached = [await serve(end, sender, receiver, i, p, w) for i, (p, w) in enumerate(
            zip(prompts, wanted, strict=True)
        )]  # fmt: skip
        assert cached == [0, 0, 0, 0, held]
        await end.break_off()


async def serve(
    end: RouterEnd,
    sender: Process,
    receiver: Process,
    number: int,
    prompt: list[int],
    wanted: list[int],
) -> int:
    """Runs one prompt over both. Returns how much of it decode held."""
    one, handover_id = attempt(str(number), prompt, NEW), new_id()
    await end.start(one, handover_id)
    await run_on(sender, receiver, one, handover_id)
    assert await end.ended(one) == {0: wanted}
    started = end.started[one.key]
    assert started.received_bytes == POSITION_BYTES * (len(prompt) - started.cached_tokens)
    return int(started.cached_tokens)


@pytest.mark.parametrize(
    "leaving, taking",
    [
        pytest.param(TWO, ONE, id="2-1"),
        pytest.param(ONE, STAGED, id="1-4", marks=pytest.mark.slow),
    ],
)
async def test_running_sequences_move_to_another_degree(
    leaving: tuple[str, ...], taking: tuple[str, ...], tmp_path: Path
) -> None:
    """As when a decode worker drains: all KV of a running sequence moves, and nothing is computed
    again."""
    folder = save_tiny_model("llama", tmp_path / "m")
    (prompt,) = random_prompts((70,), VOCAB)
    length = 200
    (wanted,) = expected("llama", [prompt], length)
    sender, receiver = command("decode", 32, *leaving), command("decode", 48, *taking)
    async with (
        worker(sender[0], folder, *sender[1], **REAL) as old,
        worker(receiver[0], folder, *receiver[1], **REAL) as new,
    ):
        here = RouterEnd(DecodeStub(old.channel), old.identity, old.identity)
        there = RouterEnd(DecodeStub(new.channel), new.identity, old.identity)
        await here.connect()
        await there.connect()
        # A stream that is too far ahead of what is confirmed waits, so it cannot end by itself.
        one = attempt("moves", prompt, length)
        await here.start(one, max_unconfirmed=20)
        (key,) = one.keys()
        await until(lambda: len(here.tokens[key]) >= 5)
        handover_id = new_id()
        await here.hand_over(key, handover_id, new.identity)
        await until(lambda: key in here.migrated_out)
        given, position = here.migrated_out[key]
        assert given == handover_id and position is not None
        output = here.tokens[key][:position]
        assert output == wanted[:position]
        moved = replace(one, attempt=1, token_ids=(*one.token_ids, *output[:-1]))
        await there.start(moved, handover_id)
        assert await there.ended(moved) == {0: wanted[moved.position :]}
        started = there.started[moved.key]
        assert started.received_bytes == POSITION_BYTES * len(moved.token_ids)
        assert started.cached_tokens == 0
        await here.break_off()
        await there.break_off()
