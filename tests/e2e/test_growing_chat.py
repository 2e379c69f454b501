"""A conversation that grows: each turn finds on both sides what the turns before it left there."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from batonlm.v1 import inference_pb2, tokenizer_pb2
from tests.e2e.relay import Answer, Relay, options

TURNS = 5
BLOCK = 16
"""Positions of a block: what a cache finds is a whole number of these."""


@dataclass
class Chat:
    """One conversation, whose every turn is long enough to be worth a prefill worker."""

    relay: Relay
    name: str
    messages: list[tokenizer_pb2.ChatMessage] = field(default_factory=list)
    turns: list[Answer] = field(default_factory=list)

    def say(self) -> None:
        words = " ".join(f"{self.name} {len(self.turns)} says {word}." for word in range(15))
        asked = f"{words} Tell me a story about {self.name}."
        self.messages.append(tokenizer_pb2.ChatMessage(role="user", content=asked))
        answer, request = Answer(), inference_pb2.ChatRequest(messages=self.messages)
        request.options.CopyFrom(options(max_tokens=40, ignore_eos=False))
        for response in self.relay.stub.Chat(request, timeout=120):
            answer.take(response.event)
        text = answer.text[0]
        self.messages.append(tokenizer_pb2.ChatMessage(role="assistant", content=text))
        self.turns.append(answer)

    def finished(self, turn: int) -> inference_pb2.RequestFinished:
        found = self.turns[turn].finished
        assert found is not None
        return found

    def before(self, turn: int, role: str) -> inference_pb2.RequestFinished | None:
        """The newest earlier turn that the worker of this one served."""
        found = [
            f
            for f in map(self.finished, range(turn))
            if served(f, role) == served(self.finished(turn), role)
        ]
        return found[-1] if found else None


def served(finished: inference_pb2.RequestFinished, role: str) -> str:
    (worker,) = [worker for worker in finished.stages.workers if worker.role == role]
    return worker.instance_id


def total(relay: Relay, role: str, name: str, **labels: str) -> float:
    return sum(relay.metric(process, name, **labels) for process in relay.processes(role))


@pytest.mark.deep
def test_each_turn_finds_the_turns_before_it(relay: Relay) -> None:
    computed = total(relay, "prefill", "baton_prefill_tokens_total")
    cached = total(relay, "prefill", "baton_cached_tokens_total")
    moved = total(relay, "decode", "baton_handover_bytes_total", side="receiver")
    chats = [Chat(relay, name) for name in ("Ada", "Grace", "Lin")]
    for _ in range(TURNS):
        for chat in chats:
            chat.say()
    found = [chat.finished(turn) for chat in chats for turn in range(TURNS)]
    again = 0
    for chat in chats:
        for turn in range(1, TURNS):
            now = chat.finished(turn)
            assert now.stages.prefill_cached_tokens == now.cached_tokens
            if before := chat.before(turn, "prefill"):
                again += 1
                assert now.cached_tokens >= before.prompt_tokens - BLOCK
            if before := chat.before(turn, "decode"):
                again += 1
                assert before.completion_tokens >= BLOCK
                # It has the answer, too.
                assert now.stages.decode_cached_tokens > before.prompt_tokens
    assert again > len(chats) * TURNS, "most turns go where the ones before are"
    # What the workers themselves counted: each token was either computed or found.
    prompts, skipped = sum(f.prompt_tokens for f in found), sum(f.cached_tokens for f in found)
    assert total(relay, "prefill", "baton_cached_tokens_total") - cached == skipped
    assert total(relay, "prefill", "baton_prefill_tokens_total") - computed == prompts - skipped
    kv_bytes = total(relay, "decode", "baton_handover_bytes_total", side="receiver") - moved
    assert kv_bytes == sum(f.stages.kv_bytes for f in found)
    a_position = chats[0].finished(0).stages.kv_bytes / chats[0].finished(0).prompt_tokens
    met = sum(f.stages.decode_cached_tokens for f in found)
    assert kv_bytes <= a_position * (prompts - met) * 1.05, "KV that decode has does not travel"
