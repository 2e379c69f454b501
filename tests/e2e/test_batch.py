"""`baton batch` against a real Baton: every line once, whatever ends in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.relay import PATIENCE_S, Relay, eventually, until_it_comes_about

Wanted = dict[str, list[int]]
"""Token ids by custom_id."""


MANY = 400
"""Lines, of which a client that is killed leaves many."""


def line(number: int, **body: Any) -> dict[str, Any]:
    prompt = [60 + (number * 7 + i * 13) % 1800 for i in range(12)]
    said = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "seed": number, **body}
    return {
        "custom_id": f"line {number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"temperature": float(number % 2), "return_token_ids": True, **said},
    }


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def results(path: Path) -> list[dict[str, Any]]:
    """Every one of them, however often. A line that is just being written is left out."""
    return [json.loads(one) for one in path.read_bytes().split(b"\n")[:-1]]


def token_ids(result: dict[str, Any]) -> list[int]:
    assert result["response"]["status_code"] == 200, result
    found: list[int] = result["response"]["body"]["choices"][0]["token_ids"]
    return found


def command(relay: Relay, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batonlm.cli.main", "batch", *words],
        env=relay.environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    said = process.communicate(timeout=timeout_s)[1]
    return process.returncode, said


@pytest.mark.deep
def test_a_batch_with_good_and_bad_lines_that_is_stopped_goes_on(
    relay: Relay, tmp_path: Path
) -> None:
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8},
    }
    good = [*(line(number, max_tokens=64) for number in range(40)), chat]
    bad = [line(90, prompt=5), {**line(91), "url": "/v1/embeddings"}, line(3)]
    write(given, [*good, *bad])

    def stopped_in_the_middle() -> bool:
        out.unlink(missing_ok=True)
        process = command(relay, str(given), str(out), "--concurrency", "4")
        eventually(lambda: out.exists() and results(out), PATIENCE_S, "the first results")
        process.send_signal(signal.SIGINT)
        code, said = ended(process)
        if len(results(out)) == len(good) + len(bad):
            return False
        assert code == 130 and f"batch {given} {out}" in said
        return 0 < len(results(out)) < len(good)

    until_it_comes_about(stopped_in_the_middle, "a batch that is stopped")
    before = out.read_bytes()

    code, said = ended(command(relay, str(given), str(out)))
    assert code == 1, said
    assert "44 lines have their result, 3 of them with errors" in said
    assert out.read_bytes().startswith(before)
    found = {one["id"]: one for one in results(out)}
    assert len(found) == len(results(out)) == 44
    assert all(found[f"batch_req_{n}"]["response"]["status_code"] == 200 for n in range(1, 42))
    refused = found["batch_req_42"]["response"]
    assert refused["status_code"] == 400 and refused["body"]["error"]["param"] == "prompt"
    assert refused["request_id"]
    assert found["batch_req_43"]["error"]["code"] == "invalid_url"
    assert found["batch_req_44"]["error"]["code"] == "duplicate_custom_id"

    code, said = ended(command(relay, str(given), str(out)))
    assert code == 1 and len(results(out)) == 44, "nothing is asked twice"


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_batch_of_many_lines_outlives_its_client_and_a_decode_worker(
    relay: Relay, tmp_path: Path
) -> None:
    given, out, calm = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "calm.jsonl"))
    lines = [line(number) for number in range(MANY)]
    write(given, lines)
    code, said = ended(command(relay, str(given), str(calm)), 600)
    assert code == 0, said
    wanted: Wanted = {one["custom_id"]: token_ids(one) for one in results(calm)}
    assert len(wanted) == MANY

    def killed_in_the_middle() -> bool:
        out.unlink(missing_ok=True)
        first = command(relay, str(given), str(out))
        eventually(lambda: out.exists() and len(results(out)) >= MANY // 4, PATIENCE_S, "a quarter")
        first.kill()
        ended(first)
        return len(results(out)) < MANY // 2

    until_it_comes_about(killed_in_the_middle, "a batch that is killed")
    part = results(out)
    # As if the kill had come in the middle of a line.
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_')

    second = command(relay, str(given), str(out))
    eventually(lambda: len(results(out)) >= MANY // 2, PATIENCE_S, "a half")
    victim = relay.processes("decode")[0]
    os.kill(victim["pid"], signal.SIGKILL)
    code, said = ended(second, 600)
    assert code == 0, said
    relay.wait_for_all(gone=victim["pid"])

    found = results(out)
    assert found[: len(part)] == part
    assert len(found) == len({one["id"] for one in found}) == MANY
    assert {one["custom_id"]: token_ids(one) for one in found} == wanted
