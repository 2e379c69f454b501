"""Chats that have to call a tool, over gRPC, and what comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batonlm.v1 import inference_pb2 as pb
from batonlm.v1 import tokenizer_pb2, types_pb2
from tests.e2e.relay import PATIENCE_S, Relay, options

NOTE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["big", "small"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["kind"],
    "additionalProperties": False,
}
COUNT = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 90,
            "maxItems": 90,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
"""Its arguments take more than two hundred tokens."""


@dataclass
class Called:
    """Of one answer: its content, and id, name and arguments of each call."""

    request_id: str = ""
    content: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    num_deltas: int = 0
    finish: int = 0

    def take(self, delta: pb.ChoiceDelta) -> None:
        self.content += delta.text
        self.finish = delta.finish_reason or self.finish
        for call in delta.tool_calls:
            self.num_deltas += 1
            whole = self.calls.setdefault(call.index, [call.id, call.name, ""])
            whole[2] += call.arguments


def tool(name: str, parameters: dict[str, Any]) -> types_pb2.Tool:
    return types_pb2.Tool(name=name, parameters=json.dumps(parameters))


def call(
    relay: Relay,
    tools: list[types_pb2.Tool],
    choice: pb.ToolChoice,
    *,
    on_delta: Callable[[int], None] = lambda _: None,
) -> Called:
    """A stop string that never comes is looked for on the way. on_delta: told after each event how
    many deltas of calls there were."""
    request = pb.ChatRequest(
        messages=[tokenizer_pb2.ChatMessage(role="user", content="Take a note, please.")],
        tools=tools,
        tool_choice=choice,
        options=options(
            max_tokens=700, temperature=1.0, seed=4, ignore_eos=False, stop=["</note>"]
        ),
    )
    called = Called()
    for response in relay.stub.Chat(request, timeout=PATIENCE_S):
        if response.event.HasField("accepted"):
            called.request_id = response.event.accepted.request_id
        if response.event.HasField("delta"):
            called.take(response.event.delta)
            on_delta(called.num_deltas)
    return called
