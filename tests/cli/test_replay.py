"""`baton replay` against a router over scripted workers, with files that fit and files that do
not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from batonlm.cli.main import main
from batonlm.core.request.request import Grammar, GrammarKind, Request
from batonlm.router.api.access import OpenAuthenticator
from batonlm.router.api.grpc.access import KeyInterceptor
from batonlm.router.api.grpc.inference import InferenceServicer
from batonlm.rpc.server import ProcessServer
from tests.services.router.conftest import World, until
from tests.services.router.disturbed import REQUEST, begin, busy
from tests.services.router.test_explain import SPLIT, http_of

KEEPING = replace(SPLIT, keep_replays=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    try:
        await made.start(KEEPING)
        yield made
    finally:
        await made.close()


@pytest.fixture
async def grpc_address(world: World) -> AsyncIterator[str]:
    servicer = InferenceServicer(world.pipeline, stall_timeout_s=30.0)
    server = ProcessServer(
        listen="127.0.0.1:0",
        services=[servicer.service()],
        interceptors=[KeyInterceptor(OpenAuthenticator())],
    )
    try:
        yield await server.start()
    finally:
        await server.stop(0)


async def kept(world: World, request: Request, query: str = "replay") -> dict[str, Any]:
    """The replay of a request that has run."""
    answer = await world.ask(request)
    async with http_of(world) as http:
        response = await http.get(f"/requests/{answer.accepted.request_id}?{query}")
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


async def replayed(document: Any, folder: Path, address: str) -> int:
    file = folder / "replay.json"
    file.write_text(json.dumps(document))
    return await asyncio.to_thread(main, ["replay", str(file), "--grpc", address])


@pytest.mark.deep
@pytest.mark.parametrize(
    "request_", [REQUEST, replace(REQUEST, n=3, seed=None), replace(REQUEST, stop_strings=("e",))]
)
async def test_the_same_tokens(
    world: World,
    grpc_address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request_: Request,
) -> None:
    document = await kept(world, request_)
    assert await replayed(document, tmp_path, grpc_address) == 0, capsys.readouterr()
    assert capsys.readouterr().out.count("the same") == request_.n
    assert "stop_strings" not in json.dumps(document)


async def test_of_a_stream_that_was_cut(world: World, grpc_address: str, tmp_path: Path) -> None:
    stream, answer = await begin(world, REQUEST, 9)
    await stream.aclose()
    await until(world.nothing_left)
    async with http_of(world) as http:
        document = (await http.get(f"/requests/{answer.accepted.request_id}?replay")).json()
    assert document["outputs"][0]["tokens"] >= 9
    assert await replayed(document, tmp_path, grpc_address) == 0


async def test_other_tokens_are_noticed(
    world: World, grpc_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = await kept(world, REQUEST)
    # The scripted workers are not in exact mode, and say so.
    assert not document["exact"]
    document["sampling"]["seed"] += 1
    assert await replayed(document, tmp_path, grpc_address) == 1
    said = capsys.readouterr().out
    assert "OTHER tokens" in said and "not served in exact mode" in said


async def test_files_that_cannot_be_replayed(
    world: World, grpc_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = await kept(world, REQUEST)
    other = document | {"model": {"name": "other", "digest": "ff"}}
    assert await replayed(other, tmp_path, grpc_address) == 1
    assert "other weights make other tokens" in capsys.readouterr().err
    grammar = document | {"grammar": {"kind": "regex", "digest": "00", "text": None}}
    assert await replayed(grammar, tmp_path, grpc_address) == 1
    assert "--text" in capsys.readouterr().err
    files: list[Any] = [{}, [], document | {"n": "x"}, document | {"prompt_token_ids": []}]
    for broken in files:
        assert await replayed(broken, tmp_path, grpc_address) == 1
        assert "is no replay file" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


async def test_a_grammar_is_told_only_when_its_text_is_asked_for(world: World) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-z]*")
    asked = replace(REQUEST, grammar=grammar, max_tokens=4, ignore_eos=False)
    hidden = await kept(world, asked)
    assert hidden["grammar"] == {"kind": "regex", "digest": grammar.digest.hex(), "text": None}
    shown = await kept(world, asked, "replay=text")
    assert shown["grammar"]["text"] == "[a-z]*"


async def test_what_is_not_there(world: World, tmp_path: Path) -> None:
    stream, answer = await begin(world, REQUEST, 3)
    busy(world).stepping.clear()
    path = f"/requests/{answer.accepted.request_id}"
    async with http_of(world) as http:
        running = await http.get(f"{path}?replay")
        assert running.status_code == 503
        await stream.aclose()
        await until(world.nothing_left)
        wrong = await http.get(f"{path}?replay=all")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "replay")
        none = await http.get("/requests/abc?replay")
        assert none.status_code == 404


async def test_nothing_is_kept_by_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    world = World()
    try:
        await world.start(SPLIT)
        answer = await world.ask(REQUEST)
        request_id = answer.accepted.request_id
        async with http_of(world) as http:
            response = await http.get(f"/requests/{request_id}?replay")
            assert response.status_code == 404
            assert "keep_replays" in response.json()["error"]["message"]
            where = httpx.URL(str(http.base_url))
            words = ["explain", request_id, "--http", f"{where.host}:{where.port}"]
            file = tmp_path / "replay.json"
            assert await asyncio.to_thread(main, [*words, "--replay", str(file)]) == 1
            assert "keep_replays" in capsys.readouterr().err
            assert not file.exists()
    finally:
        await world.close()
