"""Which model a new request runs on.

While another version of a model rolls out under the same name, there are two of it for a time. A
request is bound to one from its start: a stream never goes on with another model's tokens. So a new
one is not given to a model whose last workers leave, or whose tokenizer is not there (any more).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random

from baton.core.request.model import ModelDescription
from baton.core.routing.load import WorkerState
from baton.core.routing.worker_cost import WorkerSnapshot


def model_for(
    request_id: str,
    name: str,
    decodes: Sequence[WorkerSnapshot],
    tokenizers: Collection[str],
    detokenizers: Collection[str],
) -> ModelDescription | None:
    """One that decode workers serve under this name; of several, each as often as it has workers.

    tokenizers, detokenizers: the tokenizer digests of those that serve.
    """
    named = [worker for worker in decodes if worker.model.name == name]
    if len({worker.model.digest for worker in named}) > 1:
        serving = [worker for worker in named if worker.load.state is WorkerState.SERVING] or named
        whole = [w for w in serving if has_texts(w.model, tokenizers, detokenizers)] or serving
        return Random(request_id).choice(whole).model
    return named[0].model if named else None


def replacement_model(
    model: ModelDescription, decodes: Iterable[WorkerSnapshot]
) -> ModelDescription:
    """What a request that has no token yet may run on in place of its model, whose workers have
    left: one of the same name for which its prompt and its parameters mean the same. Else the
    model itself. Looks no further than to the first worker that still serves it."""
    replacement = model
    for worker in decodes:
        other = worker.model
        if worker.load.state is not WorkerState.SERVING or other.name != model.name:
            continue
        if other.digest == model.digest:
            return model
        same = other.tokenizer_digest == model.tokenizer_digest
        if same and other.vocab_size == model.vocab_size:
            replacement = other if other.max_model_len >= model.max_model_len else replacement
    return replacement


def has_texts(
    model: ModelDescription, tokenizers: Collection[str], detokenizers: Collection[str]
) -> bool:
    """Whether texts become tokens of this model, and tokens texts."""
    return _among(model, tokenizers) and _among(model, detokenizers)


def models_of(workers: Sequence[WorkerSnapshot]) -> list[ModelDescription]:
    """The models served, each name once, in order of name; of several of one name, one that is not
    about to leave."""
    found: dict[str, ModelDescription] = {}
    for worker in workers:
        if worker.model.name not in found or worker.load.state is WorkerState.SERVING:
            found[worker.model.name] = worker.model
    return [found[name] for name in sorted(found)]


def _among(model: ModelDescription, digests: Collection[str]) -> bool:
    wanted = model.tokenizer_digest
    return bool(digests) and (not wanted or wanted in digests or "" in digests)
