"""Has models answer under grammars, through a scheduler, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from batonlm.core.errors import BatonError
from batonlm.core.request.attempt import Attempt, SequenceKey
from batonlm.core.request.request import FinishReason, Grammar, SamplingParams, StopParams
from batonlm.core.scheduler.events import AttemptFailed, Event, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner
from batonlm.engine.config import EngineConfig
from batonlm.engine.runner import TorchRunner
from batonlm.grammar.book import Compiled
from batonlm.grammar.compiler import compile_grammar, load_vocabulary
from batonlm.rpc.model_folder import special_tokens

BUNDLED = Path(str(files("batonlm") / "models" / "baton-tiny"))


@dataclass
class Model:
    """A runner with its tokens as llguidance and as text."""

    runner: ModelRunner
    tokenizer: LLTokenizer
    texts: Tokenizer
    _kept: dict[bytes, Compiled] = field(default_factory=dict)

    def compiled(self, grammar: Grammar) -> Compiled:
        digest = grammar.digest
        if digest not in self._kept:
            self._kept[digest] = Compiled(compile_grammar(self.tokenizer, grammar))
        return self._kept[digest]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.texts.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.texts.decode(list(token_ids), skip_special_tokens=True))


def open_model(folder: Path, *, num_blocks: int = 512, **config: int) -> Model:
    runner = TorchRunner.load(EngineConfig(model=str(folder), num_blocks=num_blocks, **config))  # type: ignore[arg-type]
    model = runner.model
    return Model(runner, *_tokens(folder, model.vocab_size, model.eos_token_ids))


@cache
def _tokens(folder: Path, size: int, ends: tuple[int, ...]) -> tuple[LLTokenizer, Tokenizer]:
    special = special_tokens(folder).values()
    tokens = load_vocabulary(folder, special=special, vocab_size=size, eos_token_ids=ends)
    return tokens, Tokenizer.from_file(str(folder / "tokenizer.json"))


def attempt(
    name: str,
    model: Model,
    grammar: Grammar,
    *,
    max_tokens: int = 200,
    seed: int = 0,
    prompt: str = "The answer is ",
    sampling: SamplingParams | None = None,
    choices: tuple[int, ...] = (0,),
    accepted: Sequence[int] = (),
    **stop: bool | int,
) -> Attempt:
    tokens = model.encode(prompt)
    return Attempt(
        name,
        0,
        choices,
        (*tokens, *accepted),
        len(tokens),
        sampling or SamplingParams(seed=seed),
        StopParams(max_tokens, **stop),  # type: ignore[arg-type]
        grammar=grammar,
    )


@dataclass
class Answers:
    """What was told of attempts, by sequence."""

    tokens: dict[SequenceKey, list[int]] = field(default_factory=dict)
    finish: dict[SequenceKey, FinishReason] = field(default_factory=dict)
    failed: dict[str, BatonError] = field(default_factory=dict)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NewTokens(tokens):
                    for made in tokens:
                        self.tokens.setdefault(made.key, []).extend(made.token_ids)
                        if made.finish_reason is not None:
                            self.finish[made.key] = made.finish_reason
                case AttemptFailed(key, _, error):
                    self.failed[key.request_id] = error
                case _:
                    pass

    def of(self, name: str, choice: int = 0) -> list[int]:
        (tokens,) = [
            tokens
            for key, tokens in self.tokens.items()
            if (key.request_id, key.choice) == (name, choice)
        ]
        return tokens


def run_out(loop: EngineLoop, answers: Answers, *, most: int = 20_000) -> Answers:
    """Steps until nothing is left."""
    for number in range(most):
        answers.take(loop.step(number * 0.01))
        if not loop.scheduler.has_work:
            loop.idle_check()
            return answers
    raise AssertionError(f"still at work after {most} steps")


def from_there(one: Attempt, accepted: Sequence[int], number: int) -> Attempt:
    """The same, going on behind tokens that another attempt of it made."""
    return replace(one, attempt=number, token_ids=(*one.token_ids, *accepted))
