"""What the five processes of a real Baton tell Prometheus is clean, bounded and complete."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from batonlm.cli.http_client import scrape, total
from tests.deploy.test_dashboards import exported
from tests.e2e.relay import PATIENCE_S, Relay, eventually
from tests.exposition import LABELS, ROLES, faults, metrics

pytestmark = pytest.mark.deep

PROMTOOL = shutil.which("promtool")

MUST_HAVE = {
    "router": {
        "baton_time_to_first_token_seconds", "baton_inter_token_seconds", "baton_request_seconds",
        "baton_request_stage_seconds", "baton_queued_requests", "baton_queued_tokens",
        "baton_prompt_tokens_total", "baton_migrations_total", "baton_refusals_total",
        "baton_kv_bytes_total", "baton_tenant_tokens_total",
        "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_per_output_token_seconds",
    },
    "tokenizer": {"baton_encoded_tokens_total", "baton_sequences"},
    "prefill": {
        "baton_stage_seconds", "baton_step_seconds", "baton_step_tokens", "baton_step_sequences",
        "baton_waiting_tokens", "baton_prefill_tokens_total", "baton_cached_tokens_total",
        "baton_blocks", "baton_slots", "baton_leaks", "baton_handovers_total",
        "baton_handover_bytes_total", "baton_handover_stage_seconds",
    },
    "decode": {
        "baton_stage_seconds", "baton_step_seconds", "baton_step_tokens", "baton_step_sequences",
        "baton_decode_tokens_total", "baton_kv_source_total", "baton_preemptions_total",
        "baton_blocks", "baton_slots", "baton_leaks", "baton_handovers_total",
        "baton_handover_bytes_total", "baton_handover_stage_seconds",
    },
    "detokenizer": {"baton_text_bytes_total", "baton_sequences", "baton_streams"},
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each role tells after some work, without vLLM's names: promtool takes no colons."""
    folder = tmp_path_factory.mktemp("relay")
    flags = ("--runner", "fake", "--transport", "loopback")
    running = Relay(folder, *flags)
    try:
        for path, prompt in (
            ("completions", {"prompt": "word " * 300}),
            ("chat/completions", {"messages": [{"role": "user", "content": "word " * 300}]}),
            ("completions", {"prompt": "short"}),
        ):
            body = {**prompt, "model": "baton-tiny", "max_tokens": 20, "ignore_eos": True}
            assert post(running, path, body) == 200
        assert post(running, "completions", {"model": "no-such-model", "prompt": "a"}) == 404
        (decode,) = running.processes("decode")
        eventually(
            lambda: running.metric(decode, "baton_attempts") == 0, PATIENCE_S, "all has ended"
        )
        urls = {process["role"]: process["metrics"] for process in running.processes()}
        yield {role: own(text_of(url)) for role, url in urls.items()}
        # The command of docs/monitoring.md reads the same pages.
        assert total(scrape(urls["router"]), "baton_requests_total", 'outcome="finished"') == 3
    finally:
        running.close()


def post(running: Relay, path: str, body: dict[str, object]) -> int:
    request = urllib.request.Request(
        f"{running.http}/v1/{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def own(text: str) -> str:
    """The metrics that have Baton's or OpenTelemetry's names."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "vllm:" not in line.partition("{")[0])


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("role", ROLES)
def test_a_process_tells_what_there_is_to_know(told: dict[str, str], role: str) -> None:
    assert not MUST_HAVE[role] - metrics(told[role])
    assert f'baton_process_info{{role="{role}",version="' in told[role]


@pytest.mark.parametrize("role", ROLES)
def test_what_it_tells_keeps_the_rules(told: dict[str, str], role: str) -> None:
    assert faults(told[role]) == []


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_promtool_has_nothing_to_say(told: dict[str, str], role: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=told[role],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_metric_told_is_in_the_catalogue(told: dict[str, str]) -> None:
    found = set().union(*(metrics(text) for text in told.values()))
    assert not {name for name in found if not name.startswith("process_")} - set(exported())


def test_every_label_of_the_catalogue_is_bounded() -> None:
    used = {label for spec in exported().values() for label in spec.labels}
    assert used == set(LABELS)
