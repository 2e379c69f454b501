"""Whatever door a bad value comes through, it is refused, with the name it has there.

The values are those that killed other servers or cost them without limit: keys that hand-overs
would be found by, numbers that a sampler indexes with, counts that multiply work, and texts that a
template or a grammar would chew on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from batonlm.v1 import inference_pb2, tokenizer_pb2, types_pb2
from tests.e2e.relay import Relay
from tests.e2e.test_bad_input import violation

pytestmark = pytest.mark.deep

USER = {"role": "user", "content": "hi"}
Options = inference_pb2.GenerationOptions


@dataclass(frozen=True)
class Bad:
    """A field with a bad value. chat, text: its names over HTTP, "" where there is none. grpc: how
    to set it there, and grpc_field: the name that then comes back; None: there is no such field."""

    field: str
    value: Any
    chat: str = ""
    text: str = ""
    grpc: Callable[[Options], object] | None = None
    grpc_field: str = ""


def sampling(name: str, value: Any, http: str = "") -> Bad:
    http = http or name

    def put(options: Options) -> None:
        setattr(options.sampling, name, value)

    return Bad(http, value, http, http, put, f"options.sampling.{name}")


def stop(name: str, value: Any) -> Bad:
    def put(options: Options) -> None:
        setattr(options.stop, name, value)

    return Bad(name, value, name, name, put, f"options.stop.{name}")


def listed(name: str, values: list[Any], http: str, part: str = "stop") -> Bad:
    def put(options: Options) -> None:
        getattr(getattr(options, part), name).extend(values)

    return Bad(http, values, http, http, put, f"options.{part}.{name}")


def biased(token_id: int, bias: float) -> Bad:
    def put(options: Options) -> None:
        options.sampling.logit_bias.add(token_id=token_id, bias=bias)

    name = "logit_bias"
    return Bad(name, {str(token_id): bias}, name, name, put, "options.sampling.logit_bias")


def http_only(name: str, value: Any, *, chat: bool = True, text: bool = True) -> Bad:
    return Bad(name, value, name if chat else "", name if text else "")


BAD = [
    sampling("temperature", -1.0),
    sampling("temperature", math.nan),
    sampling("top_p", 0.0),
    sampling("top_p", math.inf),
    sampling("top_k", -7),
    sampling("min_p", 1.5),
    sampling("repetition_penalty", 0.0),
    sampling("presence_penalty", 2.5),
    sampling("frequency_penalty", -math.inf),
    stop("max_tokens", 0),
    Bad("min_tokens", 2**31, "min_tokens", "min_tokens"),
    listed("stop_token_ids", [2**31 - 1], "stop_token_ids"),
    listed("stop_token_ids", list(range(65)), "stop_token_ids"),
    listed("stop_strings", [""], "stop"),
    listed("stop_strings", ["x"] * 9, "stop"),
    listed("stop_strings", ["x" * 257], "stop"),
    listed("allowed_token_ids", [2**31 - 1], "allowed_token_ids", "sampling"),
    listed("allowed_token_ids", list(range(4097)), "allowed_token_ids", "sampling"),
    biased(2**31 - 1, 1.0),
    biased(5, 101.0),
    biased(5, math.nan),
    Bad("n", 10_000, "n", "n", lambda o: setattr(o, "n", 10_000), "options.n"),
    Bad("n", 0, "n", "n", lambda o: setattr(o, "n", 0), "options.n"),
    Bad("top_logprobs", 21, "top_logprobs", "", lambda o: setattr(o.sampling, "top_logprobs", 21),
        "options.sampling.top_logprobs"),
    http_only("logprobs", 21, chat=False),
    http_only("prompt_logprobs", 21),
    http_only("truncate_prompt_tokens", -2),
    http_only("cache_salt", "s" * 1025),
    http_only("cache_salt", 5),
    http_only("seed", 2**64),
    http_only("priority", 2**31),
    http_only("request_id", "a\r\nb"),
    http_only("bad_words", ["x"]),
    http_only("use_beam_search", True),
    http_only("length_penalty", 2.0),
    http_only("best_of", 3, chat=False),
    http_only("suffix", "x", chat=False),
    http_only("prompt_embeds", "AAAA"),
    http_only("chat_template", "{% for i in range(10**9) %}x{% endfor %}", text=False),
    http_only("chat_template_kwargs", {"messages": []}, text=False),
    http_only("chat_template_kwargs", {"x": "y" * 20_000}, text=False),
    http_only("documents", [{"text": "x"}], text=False),
]  # fmt: skip


def refused(relay: Relay, path: str, body: dict[str, Any]) -> tuple[int, str]:
    # json.dumps writes NaN, as careless clients do.
    headers = {"content-type": "application/json"}
    answer = relay.client.post(path, content=json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return answer.status_code, error["param"]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.field}={str(bad.value)[:20]}")
def test_every_door(relay: Relay, bad: Bad) -> None:
    more = {"logprobs": True} if bad.field == "top_logprobs" else {}
    given = {bad.field: bad.value}
    if bad.chat:
        body = {"messages": [USER], "max_tokens": 4, **more, **given}
        assert refused(relay, "/v1/chat/completions", body) == (400, bad.chat)
    if bad.text:
        body = {"prompt": "hi", "max_tokens": 4, **given}
        assert refused(relay, "/v1/completions", body) == (400, bad.text)
    if bad.grpc is not None:
        options = Options(stop=types_pb2.StopParams(max_tokens=4))
        bad.grpc(options)
        generate = inference_pb2.GenerateRequest(text="hi", options=options)
        message = tokenizer_pb2.ChatMessage(role="user", content="hi")
        chat = inference_pb2.ChatRequest(messages=[message], options=options)
        calls: list[Iterator[object]] = [
            relay.stub.Generate(generate, timeout=120),
            relay.stub.Chat(chat, timeout=120),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            named = violation(caught.value)
            assert named == (grpc.StatusCode.INVALID_ARGUMENT, bad.grpc_field)


def test_no_door_takes_a_hand_over_of_the_clients_own(relay: Relay) -> None:
    """It has no effect, and is said to have none."""
    body = {"messages": [USER], "max_tokens": 1, "kv_transfer_params": {"remote_engine_id": "x"}}
    answer = relay.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-baton-ignored-params"] == "kv_transfer_params"


def test_many_prompts_and_choices_are_counted_together(relay: Relay) -> None:
    body = {"prompt": ["hi"] * 100, "n": 16, "max_tokens": 1}
    assert refused(relay, "/v1/completions", body) == (400, "prompt")


def test_a_prompts_log_probabilities_are_bounded(relay: Relay) -> None:
    """By the model's context here; a larger model's are by what one message may take."""
    body = {"prompt": [[5] * 100_000], "echo": True, "logprobs": 20, "max_tokens": 0}
    assert refused(relay, "/v1/completions", body)[0] == 400
