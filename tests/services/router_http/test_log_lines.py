"""What goes wrong inside is logged under the id that the client is told."""

from __future__ import annotations

import httpx
import pytest

from tests.services.router_http.scripted import MODEL, Scripted

ASKED = {"model": MODEL.name, "prompt": "hello", "max_tokens": 4}


@pytest.mark.deep
@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_is_logged_with_its_request(
    stream: bool, http: httpx.AsyncClient, frontend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.failure = ZeroDivisionError("hush")
    answer = await http.post("/v1/completions", json=ASKED | {"stream": stream})
    assert "internal error" in answer.text and "hush" not in answer.text
    (line,) = [record for record in caplog.records if record.name.startswith("batonlm.router")]
    assert vars(line)["request_id"] == answer.headers["x-request-id"]
    assert vars(line).get("trace_id") == ("a" * 32 if stream else None)
