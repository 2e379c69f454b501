"""What the router's metrics say of requests, against what really happened to them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import ModelNotFound
from baton.core.request import Request, TextPrompt
from baton.router.config import RouterConfig
from tests.services.router.conftest import World, until

PROMPT = "one prompt, told once"
REQUEST = Request(TextPrompt(PROMPT), seed=7, max_tokens=40, ignore_eos=True)


async def test_what_really_happened_is_counted(world: World) -> None:
    await world.start(RouterConfig(local_prefill_tokens=4))
    await world.ask(REQUEST)
    await world.ask(replace(REQUEST, prompt=TextPrompt("abc")))
    assert world.counted("baton_inter_token_seconds_count") == 2 * 39
    with pytest.raises(ModelNotFound):
        await world.ask(replace(REQUEST, model="other"))
    await (await world.pipeline.open(replace(REQUEST, max_tokens=3000))).aclose()
    await until(world.nothing_left)
    assert world.counted("baton_remote_prefill_total") >= 1
    assert world.counted("baton_local_prefill_total") == 1
    assert world.counted("baton_kv_bytes_total") >= 1000
    assert world.counted("baton_time_to_first_token_seconds_count") == 2
    assert world.counted("baton_prompt_tokens_total") == 2 * len(PROMPT.encode()) + 3
    outcomes = {
        outcome: world.counted("baton_requests_total", outcome=outcome)
        for outcome in ("finished", "model_not_found", "cancelled")
    }
    assert outcomes == {"finished": 2, "model_not_found": 1, "cancelled": 1}
