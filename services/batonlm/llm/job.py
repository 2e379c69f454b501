"""Job, one request of an LLM up to its answer, and Batch, the jobs of one call."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from queue import SimpleQueue

from batonlm.client.client import Answer
from batonlm.core.errors import BatonError
from batonlm.core.request.answers import AnswerRules, Answers
from batonlm.core.request.attempt import Attempt, ChoiceTokens, TokenLog
from batonlm.core.request.first_attempt import (
    check_size,
    check_vocabulary,
    first_attempt,
    resolve_stop,
    scoring,
    seed_of,
    truncated,
)
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.request.prompt_logprobs import PromptLogprobs
from batonlm.core.request.request import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    Request,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    join_deltas,
)
from batonlm.detokenizer.text import DetokenizeOptions, StreamedText
from batonlm.detokenizer.vocabulary import Vocabulary
from batonlm.router.request.texts import PROMPT_TAIL
from batonlm.tokenizer.encoder import Encoded, Encoder


class RunningChoice:
    """One choice of a request: its tokens and its text."""

    def __init__(self, log: TokenLog, text: StreamedText, *, eager: bool) -> None:
        """eager: whether text is needed with each token, because it may end the choice or is split
        into parts."""
        self.log = log
        self._text = text
        self._eager = eager
        self._pieces: list[tuple[str, int]] = []
        """Text, and the number of tokens up to its end."""

    def take(self, tokens: ChoiceTokens) -> bool:
        """Takes new tokens; returns whether a stop string in them has ended the choice."""
        log = self.log
        log.accept(tokens)
        self._text.append(
            tokens.position,
            tokens.token_ids,
            last=log.ended,
            last_is_stop_token=log.stop_token_id is not None,
        )
        if not (self._eager or log.ended):
            return False
        news = self._text.take(sys.maxsize)
        if news.stop is not None:
            log.truncate(news.stop.position, news.stop.stop_string)
        self._pieces.append((news.text, len(log) if news.end else news.num_tokens))
        return news.stop is not None

    def deltas(self, vocabulary: Vocabulary, shown_stop_token_ids: Collection[int]) -> list[Delta]:
        """Its increments, once it has ended, as a client would get them. shown_stop_token_ids: the
        stop tokens that are reported."""
        log = self.log
        deltas = []
        start = 0
        for text, end in self._pieces or [("", len(log))]:
            logprobs = _worded(log, start, end, vocabulary) if log.has_logprobs else ()
            deltas.append(Delta(log.choice, text, log.token_ids(start, end), logprobs))
            start = end
        deltas[-1] = replace(
            deltas[-1],
            finish_reason=log.finish_reason,
            stop_string=log.stop_string,
            stop_token_id=log.stop_token_id if log.stop_token_id in shown_stop_token_ids else None,
        )
        return deltas


def _worded(
    log: TokenLog, start: int, end: int, vocabulary: Vocabulary
) -> tuple[TokenLogprobs, ...]:
    def word(token_id: int, logprob: float) -> TextLogprob:
        return TextLogprob(token_id, vocabulary.middle(token_id), logprob)

    return tuple(
        TokenLogprobs(word(token_id, entry.logprob), tuple(word(*other) for other in entry.top))
        for token_id, entry in zip(log.token_ids(start, end), log.logprobs(start, end), strict=True)
    )


class Batch:
    """The requests of one call. Belongs to the caller's thread, but for `ended`."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[tuple[Job, BatonError | None]] = SimpleQueue()
        """Jobs that have ended, with what ended them early. The event loop puts them here."""
        self.num_open = 0
        """Sequences that are unfinished."""
        self.num_tokens = 0
        """Of their prompts."""


class Job:
    """One request. The caller's thread makes it and reads it when it has ended; in between it
    belongs to the event loop."""

    def __init__(
        self,
        batch: Batch,
        index: int,
        request_id: str,
        request: Request,
        encoded: Encoded,
        model: ModelDescription,
        adapter: AdapterDescription | None,
        vocabulary: Vocabulary,
    ) -> None:
        """index: its place in the batch. model: with its answers' format. adapter: that computes
        it beside the model. Raises InvalidArgument,
        naming the field, for a request that the model cannot run."""
        answers = AnswerRules().of(request, model.answer_format, left_open=encoded.reasoning_open)
        self.tools_bind = answers is not None and request.grammar is None
        """Whether the grammar comes from the request's tools."""
        if answers is not None and self.tools_bind:
            request = replace(request, grammar=answers.grammar(None))
        prompt, _ = truncated(request, tuple(encoded.token_ids), b"", model)
        stop = resolve_stop(request, len(prompt), model)
        if answers is not None:
            stop = answers.ending(stop, model)
        check_vocabulary(request, model)
        check_size(request, len(prompt))
        digest = adapter.digest if adapter else ""
        seed = seed_of(request, secrets.token_hex(16))
        own = first_attempt(request, request_id, prompt, seed, stop, digest)
        self.model_name = adapter.name if adapter else model.name
        """As the answer says it."""
        self.batch = batch
        self.index = index
        self.request = request
        self.attempts: deque[Attempt] = deque()
        """Those that have not ended, in the order in which they run: one that scores the prompt, if
        the request asks for that, and the request's own."""
        if request.prompt_logprobs is not None:
            self.attempts.append(scoring(own, f"{request_id}-prompt", request.prompt_logprobs))
        if stop.max_tokens:
            self.attempts.append(own)
        self.choices = [self._choice(choice, own, answers, vocabulary) for choice in own.choices]
        self.cached_tokens = 0
        """Prompt tokens that were in the prefix cache."""
        self.scores: PromptLogprobs | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Of the deadline."""
        self._own = own
        self._answers = answers
        """The formats of a chat's answers, when they are more than text."""

    @property
    def num_prompt_tokens(self) -> int:
        return self._own.num_prompt_tokens

    def _choice(
        self, choice: int, own: Attempt, answers: Answers | None, vocabulary: Vocabulary
    ) -> RunningChoice:
        request = self.request
        options = DetokenizeOptions(
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            kept_special_tokens=answers.markers if answers is not None else (),
            prompt_tail_ids=tuple(own.token_ids[-PROMPT_TAIL:]),
            min_tokens=request.min_tokens,
        )
        log = TokenLog(choice)
        log.attempt = own.attempt
        if not own.stop.max_tokens:
            log.finish_reason = FinishReason.LENGTH
        eager = answers is not None or bool(request.stop_strings)
        return RunningChoice(log, StreamedText(vocabulary, options), eager=eager)

    def answer(self, vocabulary: Vocabulary, encoder: Encoder) -> Answer:
        """The answer, once the job has ended well."""
        request, prompt, seed = self.request, self._own.token_ids, self._own.sampling.seed
        text = ""
        if request.echo:
            whole = request.truncate_prompt_tokens is None
            if whole and isinstance(request.prompt, TextPrompt):
                text = request.prompt.text
            else:
                text = encoder.decode(prompt, request.skip_special_tokens)
        scores = self.scores
        accepted = Accepted(
            self._own.request_id,
            self.model_name,
            len(prompt),
            seed,
            tuple(prompt) if request.return_token_ids else (),
            text,
            () if scores is None else tuple(scores.worded(prompt, vocabulary.middle)),
        )
        readers = self._answers.deltas(request.n, prompt, seed) if self._answers else ()
        choices = []
        for choice in self.choices:
            deltas = choice.deltas(vocabulary, request.stop_token_ids)
            if readers:
                deltas = [readers[choice.log.choice].of(delta) for delta in deltas]
            choices.append(join_deltas(choice.log.choice, deltas))
        finished = Finished(
            prompt_tokens=len(prompt),
            completion_tokens=sum(len(choice.log) for choice in self.choices),
            cached_tokens=self.cached_tokens,
            reasoning_tokens=sum(reader.reasoning_tokens for reader in readers),
        )
        return Answer(accepted, tuple(choices), finished)
