"""Workers whose tokenizers differ never serve one request, though they are of one pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batonlm.router.config import RouterConfig
from batonlm.testing import language
from batonlm.testing.scripted import ScriptedDetokenizer, ScriptedTokenizer
from tests.services.router.conftest import World, read
from tests.services.router.disturbed import EXPECTED, REQUEST

REQUESTS = 8


@pytest.mark.deep
async def test_only_workers_with_the_models_tokenizer_are_asked(world: World) -> None:
    """As while a new version of a tokenizer rolls out."""
    old, new = (replace(language.MODEL, tokenizer_digest=name) for name in ("old", "new"))
    world.tokenizers += [ScriptedTokenizer(model=model) for model in (old, new, old)]
    world.detokenizers += [ScriptedDetokenizer(model=model) for model in (old, new, old)]
    world.prefills.append(world.new_prefill())
    world.decodes.append(world.new_decode())
    for worker in (*world.prefills, *world.decodes):
        worker.model = new
    pipeline = await world.run(RouterConfig(local_prefill_tokens=0))
    for _ in range(REQUESTS):
        answer = await read(await pipeline.open(REQUEST))
        assert tuple(answer.token_ids[0]) == EXPECTED
    assert [len(tokenizer.remaining_s) for tokenizer in world.tokenizers] == [0, REQUESTS, 0]
    assert [len(worker.openings) for worker in world.detokenizers] == [0, REQUESTS, 0]
