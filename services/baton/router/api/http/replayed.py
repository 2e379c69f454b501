"""Words what makes a request's tokens again, as `replay_schema` says; knows no route."""

from __future__ import annotations

from baton.core.observe.replay import Replay, unpacked
from baton.core.request.grammar import Grammar
from baton.router.api.http.respond import Json


def replay_document(request_id: str, replay: Replay, *, with_text: bool) -> Json:
    """replay: of a request that is over. with_text: with what its client wrote, where that is
    needed."""
    sampling, stop = replay.sampling, replay.stop
    return {
        "object": "baton.replay",
        "version": 1,
        "request_id": request_id,
        "model": {"name": replay.model.name, "digest": replay.model.digest},
        "exact": replay.exact,
        "prompt_token_ids": unpacked(replay.prompt).tolist(),
        "n": replay.n,
        "sampling": {
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids,
        },
        "stop": {
            "max_tokens": stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop_token_ids": stop.stop_token_ids,
            "ignore_eos": stop.ignore_eos,
        },
        "grammar": _grammar(replay.grammar, with_text=with_text),
        "outputs": [
            {"tokens": tokens, "sha256": digest}
            for tokens, digest in zip(replay.output_tokens, replay.digests, strict=True)
        ],
    }


def _grammar(grammar: Grammar | None, *, with_text: bool) -> Json | None:
    if grammar is None:
        return None
    return {
        "kind": grammar.kind.name.lower(),
        "digest": grammar.digest.hex(),
        "text": grammar.text if with_text else None,
    }
