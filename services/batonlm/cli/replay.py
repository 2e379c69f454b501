"""`baton replay`: generates a request's tokens again and compares them with a replay file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from batonlm.cli import access
from batonlm.client import Client, Options
from batonlm.core.errors import InvalidArgument
from batonlm.core.observe.request_record import digest
from batonlm.router.api.http.answer_schema import ReplayFile


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome for one choice."""

    choice: int
    expected: int
    """Number of tokens to compare."""
    made: int
    """Number of tokens received."""
    same: bool


def replay(client: Client, file: ReplayFile) -> list[ReplayOutcome]:
    """Runs the request of a replay file on a router. Raises InvalidArgument if the model is not
    served or the file is incomplete, and the router's BatonErrors."""
    model = _model(client, file)
    stream = client.generate(file.prompt_token_ids, model=model, **_options(file))
    made: dict[int, tuple[int, ...]] = {}
    for choice in stream.read().choices:
        made[choice.choice] = tuple(choice.token_ids)
    outcomes = []
    for number, output in enumerate(file.outputs):
        ids = made.get(number, ())
        same = digest(ids[: output.tokens]) == output.sha256
        outcomes.append(ReplayOutcome(number, output.tokens, len(ids), same))
    return outcomes


def _model(client: Client, file: ReplayFile) -> str:
    """Returns the name under which the router serves the file's weights. Raises
    InvalidArgument."""
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
    stop = file.stop
    # An answer that a stop string or a client's disconnect ended has no more tokens than these.
    most = max(1, *(output.tokens for output in file.outputs))
    given = msgspec.structs.asdict(file.sampling) | {
        "n": file.n,
        "logit_bias": dict(file.sampling.logit_bias),
        "max_tokens": most,
        "min_tokens": min(stop.min_tokens, most),
        "stop_token_ids": stop.stop_token_ids,
        "ignore_eos": stop.ignore_eos,
        "return_token_ids": True,
    }
    options = cast(Options, given)
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


DEFAULT_ADDRESS = "127.0.0.1:50051"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        description="Sends the token ids of FILE (of 'baton explain ID --replay FILE') with the "
        "same sampling and seed, and compares what comes: 0 when all tokens are the same, else 1.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        help=f"default: where `baton up` runs, else {DEFAULT_ADDRESS}",
    )
    access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the tokens are the same, else 1. Raises BatonError."""
    from batonlm.client import Client

    file = _read(args.file)
    where = access.access_of(args, DEFAULT_ADDRESS)
    tls = False if where.ca is None else where.ca or True
    with Client(where.address, api_key=where.key, tls=tls) as client:
        outcomes = replay(client, file)
    for outcome in outcomes:
        text = "the same" if outcome.same else f"OTHER tokens (there are {outcome.made} now)"
        print(f"choice {outcome.choice}: {outcome.expected} tokens, {text}")
    if all(outcome.same for outcome in outcomes):
        return 0
    print(_why(exact=file.exact))
    return 1


def _why(*, exact: bool) -> str:
    if not exact:
        return "The request was not served in exact mode: the same tokens are not promised."
    return (
        "The request was served in exact mode. The same tokens are promised of workers in exact "
        "mode with the same weights, numbers (dtype, quantization) and kind of device."
    )


def _read(path: Path) -> Any:
    """Reads a ReplayFile. Raises InvalidArgument."""
    import msgspec

    from batonlm.router.api.http.answer_schema import ReplayFile

    try:
        return msgspec.json.decode(path.read_bytes(), type=ReplayFile)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="FILE") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # msgspec's messages contain what is wrong and where, and no contents.
        raise InvalidArgument(f"{path} is no replay file: {error}", field="FILE") from None
