"""Makes the tokens of a replay file again on a router, and compares."""

from __future__ import annotations

from dataclasses import dataclass

from baton.client import Client, Options
from baton.core.errors import InvalidArgument
from baton.core.observe.request_record import digest
from baton.router.api.http.answer_schema import ReplayFile


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one choice. expected: tokens to compare; made: how many came."""

    choice: int
    expected: int
    made: int
    same: bool


def replay(client: Client, file: ReplayFile) -> list[Outcome]:
    """Raises InvalidArgument for a file whose model is not served there or that lacks something,
    and BatonError for what the router says."""
    model = _model(client, file)
    stream = client.generate(file.prompt_token_ids, model=model, **_options(file))
    made: dict[int, tuple[int, ...]] = {}
    for choice in stream.read().choices:
        made[choice.choice] = tuple(choice.token_ids)
    outcomes = []
    for number, output in enumerate(file.outputs):
        ids = made.get(number, ())
        same = digest(ids[: output.tokens]) == output.sha256
        outcomes.append(Outcome(number, output.tokens, len(ids), same))
    return outcomes


def _model(client: Client, file: ReplayFile) -> str:
    """The name under which the router serves the file's weights. Raises InvalidArgument."""
    served = client.models()
    for model in served:
        if model.digest == file.model.digest:
            return model.name
    others = ", ".join(f"{model.name} ({model.digest[:12]})" for model in served) or "no model"
    raise InvalidArgument(
        f"the file is of {file.model.name} with weights {file.model.digest[:12]}, and this router "
        f"serves {others}: other weights make other tokens",
        field="model",
    )


def _options(file: ReplayFile) -> Options:
    """Raises InvalidArgument for a grammar without its text."""
    sampling, stop = file.sampling, file.stop
    # What a stop string ended, or a client that left, went no further.
    most = max(1, *(output.tokens for output in file.outputs))
    options = Options(
        n=file.n,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        max_tokens=most,
        min_tokens=min(stop.min_tokens, most),
        stop_token_ids=stop.stop_token_ids,
        ignore_eos=stop.ignore_eos,
        return_token_ids=True,
    )
    if file.grammar is None:
        return options
    text = file.grammar.text
    if text is None:
        raise InvalidArgument(
            "the request's grammar is not in the file: get it with 'baton explain ID --replay FILE "
            "--text'",
            field="grammar",
        )
    match file.grammar.kind:
        case "json_schema":
            options["json_schema"] = text
        case "regex":
            options["regex"] = text
        case "lark":
            options["lark"] = text
        case "gbnf":
            options["gbnf"] = text
    return options
