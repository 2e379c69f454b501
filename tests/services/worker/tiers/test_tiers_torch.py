"""In exact mode, tokens are the reference's bit by bit, wherever the KV before them came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batonlm.core.request.attempt import Attempt
from batonlm.v1.decode_pb2_grpc import DecodeStub
from tests import depth
from tests.greedy import greedy_tokens
from tests.services.worker.pair import attempt
from tests.services.worker.processes import LOOPBACK, worker
from tests.services.worker.router_end import RouterEnd
from tests.services.worker.tiers.test_tiers import ALWAYS, UNIT, again, answer_of, restored, until

BUNDLED = Path(__file__).parents[4] / "services/batonlm/models/baton-tiny"
torch.set_num_threads(1)


def prompt(number: int) -> Attempt:
    ids = tuple(60 + (number * 31 + i * 7) % 400 for i in range(400))
    one = attempt(f"{number}", size=400, max_tokens=12, greedy=True)
    return replace(one, token_ids=ids)


@pytest.mark.timeout(600)
async def test_tokens_are_those_of_the_reference(tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    known: dict[Sequence[int], list[int]] = {}
    flags = (
        *("--prefix-host-mib", "64", "--prefix-disk-mib", "64"),
        *("--prefix-disk-folder", str(tmp_path), *ALWAYS),
        *("--threads", "1", "--max-running", "4", "--max-model-len", "512"),
        *("--kv-memory-mib", "3"),
        *LOOPBACK,
    )

    async def check(end: RouterEnd, one: Attempt) -> int:
        expected = known.setdefault(one.token_ids, greedy_tokens(network, list(one.token_ids), 12))
        found = await answer_of(end, one)
        assert found and found == expected[: len(found)]
        return end.started[one.key].cached_tokens

    for turn, tier in enumerate(("host", "disk") if depth.DEEP else ("host",)):
        # The second worker begins with what the first one left in the folder.
        async with worker("batonlm.decode", BUNDLED, *flags, runner="torch") as process:
            end = RouterEnd(DecodeStub(process.channel), process.identity, process.identity)
            await end.connect()
            if tier == "disk":
                await until(process, 1, "baton_prefix_tier_bytes", tier="disk")
                assert await check(end, again(prompt(0), turn)) >= UNIT
            for number in range(6):
                await check(end, again(prompt(number), 10 * turn))
            for number in range(6):
                await check(end, again(prompt(number), 10 * turn + 1))
            assert await restored(process, tier)
            await end.break_off()
            await process.idle()
            process.process.terminate()
            assert await process.exit_code() == 0
