"""Other people's clients against a real Baton, unmodified and from their own packages.

Each says what it got; what it should have got is what the others got: answers are greedy.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
PROTOS = Path(__file__).parents[2] / "protos"
MESSAGES = [{"role": "user", "content": "Who are you?"}]


def said(served: Served, *command: str | Path, tight: str, **more: str) -> dict[str, Any]:
    """What a client that is also limited for a while got in the end."""
    before = served.refusals()
    got: dict[str, Any] = json.loads(served.run(*command, tight=tight, **more).splitlines()[-1])
    assert served.refusals() > before, "somebody was refused"
    assert got["retried"] == [got["chat"]] * 4, "and asked again by itself"
    return got


def check_texts(served: Served, got: dict[str, Any]) -> None:
    check_chat(served, got)
    assert got["completion"]
    assert got.get("completion_streamed", got["completion"]) == got["completion"]


def check_chat(served: Served, got: dict[str, Any]) -> None:
    """Against what Baton says to somebody who knows it."""
    chat = served.run(
        "curl", "-sS", f"{served.relay.http}/v1/chat/completions",
        "-H", f"authorization: Bearer {served.key}", "-H", "content-type: application/json",
        "-d", json.dumps({"messages": MESSAGES, "max_tokens": 12, "temperature": 0}),
    )  # fmt: skip
    assert got["chat"] == json.loads(chat)["choices"][0]["message"]["content"]
    assert got["chat"]
    assert got.get("chat_streamed", got["chat"]) == got["chat"]
    assert got.get("response", got["chat"]).startswith(got["chat"])
    assert got.get("response_streamed") == got.get("response")


@pytest.mark.parametrize("language", ["python", "node"])
def test_openai(served: Served, request: pytest.FixtureRequest, language: str) -> None:
    if language == "python":
        python = request.getfixturevalue("python_clients") / "python"
        got = said(served, python, SCRIPTS / "with_openai.py", tight="openai")
    else:
        folder: Path = request.getfixturevalue("node_clients")
        script = shutil.copy(SCRIPTS / "with_openai.mjs", folder)
        got = said(served, "node", script, tight="node")
    check_texts(served, got)
    assert got["models"] == ["baton-tiny"]
    assert got["usage"][0] == got["usage"][1] > 0
    assert got["errors"] == [
        ["NotFoundError", 404, "model", True],
        ["BadRequestError", 400, "temperature", True],
    ]


def told_in(served: Served, request: pytest.FixtureRequest, language: str, name: str) -> Any:
    """What the script of this name got with Python's package, or with npm's."""
    if language == "python":
        command = request.getfixturevalue("python_clients") / "python", SCRIPTS / f"{name}.py"
    else:
        folder: Path = request.getfixturevalue("node_clients")
        command = Path("node"), Path(shutil.copy(SCRIPTS / f"{name}.mjs", folder))
    return json.loads(served.run(*command).splitlines()[-1])


def test_responses(served: Served, python_clients: Path) -> None:
    script = SCRIPTS / "with_responses.py"
    got = json.loads(served.run(python_clients / "python", script).splitlines()[-1])
    check_chat(served, got)
    assert got["final"].startswith(got["chat"]) and got["retrieved"] == got["chat"]
    assert got["events"] == ["response.created", "response.incomplete"]
    assert got["status"] == ["incomplete", "max_output_tokens"]
    assert got["usage"] == [12, 12]
    assert got["continued"][0] == got["continued"][1] != got["chat"]
    assert got["item"] == "Who are you?"
    assert got["parsed"] == ["age", "name"]
    assert got["background"] == ["in_progress", "incomplete", got["chat"]]
    assert got["again"] == [3, "response.incomplete"]
    assert got["cancelled"] in ("cancelled", "completed")
    called, answer = got["agent"]
    assert called == [["get_weather", {"city": "Paris"}]]
    assert "sunny" in answer and "21" in answer
    assert got["errors"] == [
        ["NotFoundError", 404, "response_id"],
        ["NotFoundError", 404, "model"],
        ["BadRequestError", 400, "tools[0].type"],
    ]


def test_anthropic(served: Served, python_clients: Path) -> None:
    got = said(served, python_clients / "python", SCRIPTS / "with_anthropic.py", tight="anthropic")
    check_messages(served, got)
    assert got["with_token"] == got["chat"]


def test_anthropic_in_node(served: Served, request: pytest.FixtureRequest) -> None:
    check_messages(served, told_in(served, request, "node", "with_anthropic"))


def check_messages(served: Served, got: dict[str, Any]) -> None:
    check_chat(served, got)
    assert got["models"] == [["model", "baton-tiny"]]
    assert got["shown"] == ["baton-tiny", "baton-tiny", True]
    assert got["stop_reasons"] == ["max_tokens"] * 2
    assert got["usage"] == [12, 12]
    assert got["counted"][0] == got["counted"][1] > 0
    called, answer, reason = got["agent"]
    assert called == [["get_weather", {"city": "Paris"}]] and reason == "end_turn"
    assert "sunny" in answer and "21" in answer
    assert got["errors"] == [
        ["NotFoundError", 404, "not_found_error", True],
        ["BadRequestError", 400, "invalid_request_error", True],
    ]


@pytest.mark.parametrize("language", ["python", "node"])
def test_ollama(served: Served, request: pytest.FixtureRequest, language: str) -> None:
    got = told_in(served, request, language, "with_ollama")
    check_chat(served, got)
    assert got["loaded"] == [True, "load", ""]
    assert got["models"] == got["running"] == ["baton-tiny"]
    assert got["capabilities"] == ["completion", "tools"]
    assert got["generated"] == got["chat"]
    assert got["done"] == ["length"] * 3
    assert got["counts"] == [12, 12]
    called, answer = got["agent"]
    assert called == [["get_weather", {"city": "Paris"}]]
    assert "sunny" in answer and "21" in answer
    (missing, name), (refused, why) = got["errors"]
    assert (missing, refused) == (404, 400) and "baton-tiny" in name and "not supported" in why


def test_ollamas_curl_names_no_type(served: Served) -> None:
    """As in its documentation: `-d` sends the type of a form."""
    asked = {"model": "baton-tiny", "messages": MESSAGES, "stream": False}
    key = f"authorization: Bearer {served.key}"
    where = f"{served.relay.http}/api/chat"
    got = json.loads(served.run("curl", "-sS", where, "-H", key, "-d", json.dumps(asked)))
    assert got["done"] and got["message"]["content"]


def test_litellm(served: Served, python_clients: Path) -> None:
    script = SCRIPTS / "with_litellm.py"
    # Without this it first asks the internet for prices.
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    got = said(served, python_clients / "python", script, tight="litellm", **local)
    check_texts(served, got)
    assert got["errors"] == [["NotFoundError", 404], ["BadRequestError", 400]]


def test_llm(served: Served, python_clients: Path, tmp_path: Path) -> None:
    models = (
        f"- model_id: baton\n  model_name: baton-tiny\n  api_base: {served.relay.http}/v1\n"
        "  api_key_name: baton\n"
    )
    (tmp_path / "extra-openai-models.yaml").write_text(models)

    def ask(key: str, *more: str) -> str:
        words = ("-m", "baton", "Who are you?", "--key", key, "-o", "temperature", "0")
        limit = ("-o", "max_tokens", "12", "--no-log")
        return served.run(
            python_clients / "llm", *words, *limit, *more, LLM_USER_PATH=str(tmp_path)
        ).strip()

    before = served.refusals()
    streamed, whole = ask(served.key), ask(served.key, "--no-stream")
    assert streamed == whole != ""
    # At once: a start of this program takes about as long as the limit makes one wait.
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, [served.tight_keys["llm"]] * 4)) == [whole] * 4
    assert served.refusals() > before


def test_buf_curl(served: Served, node_clients: Path) -> None:
    buf = (node_clients / "node_modules" / ".bin" / "buf", "curl", "--protocol", "grpc")
    header = f"authorization: Bearer {served.key}"
    # Reflection is a call of its own, with headers of its own.
    key = ("-H", header, "--reflect-header", header, "--http2-prior-knowledge")
    where = f"http://{served.relay.description['grpc']}"
    listed = served.run(*buf, *key, "--list-services", where)
    assert "baton.v1.Inference" in listed.split()
    asked = {
        "messages": MESSAGES,
        "options": {"sampling": {"temperature": 0}, "stop": {"maxTokens": 12}},
    }
    chat = f"{where}/baton.v1.Inference/Chat"
    events = _documents(served.run(*buf, *key, "-d", json.dumps(asked), chat))
    text = "".join(one["event"].get("delta", {}).get("text", "") for one in events)
    assert text
    assert "finished" in events[-1]["event"]
    failed = served.run(
        "sh", "-c", '"$0" "$@" 2>&1 || true', *buf, *key, "-d", '{"model": "other"}', chat
    )
    assert '"not_found"' in failed or '"invalid_argument"' in failed


def test_grpcio(served: Served, python_clients: Path, tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("baton/v1/*.proto"))
    served.run(
        python_clients / "python", "-m", "grpc_tools.protoc", f"-I{PROTOS}",
        f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *sources,
    )  # fmt: skip
    script = SCRIPTS / "with_grpcio.py"
    got = said(served, python_clients / "python", script, tmp_path, tight="grpcio")
    check_texts(served, got)
    assert got["errors"] == [["NOT_FOUND"]]


def _documents(text: str) -> list[dict[str, Any]]:
    """JSON documents one behind the other."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(text.rstrip()):
        document, place = decoder.raw_decode(text, place + text[place:].find("{"))
        found.append(document)
    return found


def test_connect_web(served: Served, node_clients: Path) -> None:
    """What a web page runs: Connect's own client with code that buf generates."""
    script = shutil.copy(SCRIPTS / "with_connect.mjs", node_clients)
    plugin = {
        "local": "protoc-gen-es",
        "out": str(node_clients / "gen"),
        "opt": "target=js,import_extension=js",
    }
    template = json.dumps({"version": "v2", "plugins": [plugin]})
    tools = node_clients / "node_modules" / ".bin"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    served.run(tools / "buf", "generate", PROTOS, "--template", template, PATH=path)
    got = json.loads(served.run("node", script))
    json_form, binary = got["chat"]
    assert json_form == binary and json_form[0] and json_form[1] == 12
    assert got["models"] == [["baton-tiny"]] * 2
    info, field = "google.rpc.ErrorInfo", "google.rpc.BadRequest"
    assert got["errors"] == 2 * [
        ["InvalidArgument", [info, field]],
        ["NotFound", [info, field]],
        ["Unauthenticated", [info]],
        ["Unauthenticated", [info]],
        ["DeadlineExceeded", []],
    ]
