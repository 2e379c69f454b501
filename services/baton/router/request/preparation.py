"""Prepares an admitted request: from the Request to a RequestRunner that is not started yet.

choose the model → encode → does it fit the model → draw what the client left open → settle what
it was admitted for → score the prompt, if the client wants that → RequestRunner
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from baton.core.errors import ContextLengthExceeded, InvalidArgument, ModelNotFound, Unavailable
from baton.core.kvcache.prefix import HASH_BYTES, UNIT_TOKENS
from baton.core.observe.request_record import Replay, packed
from baton.core.observe.stages import UNTRACED, Stage, TraceContext
from baton.core.request.answers import AnswerDeltas, AnswerRules
from baton.core.request.model import ModelDescription
from baton.core.request.prompt_logprobs import MAX_BYTES, PromptLogprobs, entries_bytes
from baton.core.request.request import (
    Accepted,
    Request,
    SamplingParams,
    StopParams,
    TextLogprob,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
)
from baton.core.request.request_state import RequestState
from baton.router.config import RouterConfig
from baton.router.observe.metrics import RouterMetrics
from baton.router.observe.stage_timer import StageTimer
from baton.router.request.admission import Permit
from baton.router.request.dispatcher import Dispatcher, QueueEntry
from baton.router.request.guards import Guards
from baton.router.request.pacing import DeferredCalls, LoadMonitor
from baton.router.request.runner import RequestRunner, RequestRunnerLimits
from baton.router.request.texts import PROMPT_TAIL, Speller, TextOptions
from baton.router.workers.clients import EncodedPrompt
from baton.router.workers.fleet import Fleet
from baton.router.workers.tokenizers import AskedBy, Tokenizers
from baton.rpc.trace_names import SCORE
from baton.rpc.tracing import now

WORDED_AT_ONCE = 1024
"""Entries that are put into words before others get their turn."""

UNREAD = TextOptions((), False, False, (), (), 0, frozenset())
"""Of the token that nobody sees."""


def check_size(request: Request, num_prompt: int) -> None:
    """Raises InvalidArgument for more than is told of one prompt."""
    num_top = request.prompt_logprobs
    if num_top is not None and entries_bytes(num_prompt, num_top) > MAX_BYTES:
        most = MAX_BYTES // entries_bytes(1, num_top)
        raise InvalidArgument(
            f"prompt_logprobs with {num_top} alternatives are told of prompts of at most {most} "
            f"tokens; this one has {num_prompt}.",
            field="prompt_logprobs",
        )


def scoring_request_state(
    request: Request, request_id: str, prompt: tuple[int, ...], max_attempts: int
) -> RequestState:
    """A request state that scores the prompt and ends with its first token."""
    return RequestState(
        f"{request_id}-prompt",
        prompt,
        n=1,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=1, ignore_eos=True),
        max_fruitless_attempts=max_attempts,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        prompt_logprobs=request.prompt_logprobs,
    )


async def score(
    runner: RequestRunner, speller: Speller, tokenizer_digest: str, deadline: float
) -> tuple[TokenLogprobs, ...]:
    """The entries of a prompt's tokens, the first one's of no meaning. runner: of a scoring run;
    deadline: on the running loop's clock. Raises BatonError."""
    prompt = runner.request_state.prompt
    await runner.run()
    told = runner.prompt_logprobs
    if told is None:
        # A decode worker's stream broke just when it told them; its token alone came again.
        raise Unavailable("The prompt's log-probabilities were lost.", retry_after_s=1.0)
    names = chain(prompt, told.alternatives())
    texts = await speller.spell(names, tokenizer_digest, deadline)
    return await _worded(prompt, told, texts)


async def _worded(
    prompt: tuple[int, ...], told: PromptLogprobs, texts: dict[int, bytes]
) -> tuple[TokenLogprobs, ...]:
    def word(token_id: int, logprob: float) -> TextLogprob:
        return TextLogprob(token_id, texts[token_id], logprob)

    entries = [TokenLogprobs(word(prompt[0], 0.0))]
    for token_id, entry in zip(prompt[1:], told.entries(), strict=True):
        top = tuple(word(other, value) for other, value in entry.top)
        entries.append(TokenLogprobs(word(token_id, entry.logprob), top))
        if not len(entries) % WORDED_AT_ONCE:
            await asyncio.sleep(0)
    return tuple(entries)


def resolve_stop(request: Request, num_prompt: int, model: ModelDescription) -> StopParams:
    """Checks that prompt and output fit the model, and fills in the longest output."""
    if num_prompt == 0:
        raise InvalidArgument("The prompt has no tokens.", field="prompt")
    room = model.max_model_len - num_prompt
    if room < max(1, request.max_tokens or 0):
        raise ContextLengthExceeded(
            f"This model's context is {model.max_model_len} tokens: {num_prompt} of prompt and "
            f"{request.max_tokens or 'at least 1'} of output do not fit.",
            field="prompt" if room < 1 else "max_tokens",
        )
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if request.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens must be at most {max_tokens}, the longest output.", field="min_tokens"
        )
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        stop_strings=request.stop_strings,
        include_stop_string=request.include_stop_string,
    )


def check_vocabulary(request: Request, model: ModelDescription) -> None:
    """Token ids that a worker would index with."""
    fields = {
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.sampling.allowed_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in request.sampling.logit_bias),
    }
    for field, token_ids in fields.items():
        if any(token_id >= model.vocab_size for token_id in token_ids):
            raise InvalidArgument(
                f"{field} must hold token ids below {model.vocab_size}.", field=field
            )


def truncated(
    request: Request, prompt: tuple[int, ...], prefix_hashes: bytes, model: ModelDescription
) -> tuple[tuple[int, ...], bytes]:
    """The prompt as far as the request wants it, and the hashes that still hold of it."""
    most = request.truncate_prompt_tokens
    if most == -1:
        most = model.max_model_len - max(1, request.max_tokens or 1)
    if most is None or most < 1 or len(prompt) <= most:
        return prompt, prefix_hashes
    if request.truncation_side == "right":
        return prompt[:most], prefix_hashes[: most // UNIT_TOKENS * HASH_BYTES]
    return prompt[-most:], b""


NAMED_AT_ONCE = 4096
"""Tokens whose names are asked for together."""

SEED_BITS = 53
"""Of the seeds drawn here: every JSON reader keeps them exact."""


class Prepared(NamedTuple):
    """runner: runs the request; None when there is nothing to generate. parts: what each choice's
    deltas are put through; empty: nothing."""

    runner: RequestRunner | None
    accepted: Accepted
    parts: tuple[AnswerDeltas, ...] = ()


class Preparation:
    """One per router. background: keeps a task until it is done."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        metrics: RouterMetrics,
        dispatcher: Dispatcher,
        guards: Guards,
        pace: LoadMonitor,
        later: DeferredCalls,
        background: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._pace = pace
        self._later = later
        self._background = background
        self._limits = RequestRunnerLimits(
            routing=config.routing,
            max_attempts=config.max_attempts,
            wait_timeout_s=config.wait_timeout_s,
            max_unconfirmed=config.max_unconfirmed,
            timings=config.timings,
        )
        self._guards = guards
        self._answer_rules = AnswerRules(config.tool_format, config.reasoning_format)
        self._tokenizers = Tokenizers(fleet, config, guards.budget)

    def models(self) -> list[ModelDescription]:
        """The models that can be asked for now."""
        wanted = self._config.model
        return [model for model in self._fleet.models() if wanted in ("", model.name)]

    async def prepare(
        self, request: Request, request_id: str, held: Permit, stages: StageTimer
    ) -> Prepared:
        """Raises BatonError."""
        self._guards.budget.started()
        model = await self._model(request.model, request_id)
        encoded = await self._tokenizers.encode(
            request.prompt,
            request.cache_salt,
            model,
            _asked_by(held, request_id, stages.trace.stage_context),
            size=held.input_bytes,
            grammar=request.grammar,
            most_tokens=model.max_model_len if request.truncate_prompt_tokens is None else None,
            on_turn=held.grant.encoding,
            on_served=stages.served_by,
        )
        held.grant.encoded(encoded.too_many or len(encoded.token_ids))
        if encoded.too_many:
            resolve_stop(request, encoded.too_many, model)
        answers = self._answer_rules.of(
            request, encoded.answer_format, left_open=encoded.reasoning_open
        )
        if answers is not None and request.grammar is None:
            request = replace(request, grammar=answers.grammar())
            if request.grammar is not None:
                await self._check_tools(request, encoded, request_id, model, held, stages)
        stages.reached(Stage.TURN)
        prompt, hashes = truncated(request, encoded.token_ids, encoded.prefix_hashes, model)
        stop = resolve_stop(request, len(prompt), model)
        check_vocabulary(request, model)
        check_size(request, len(prompt))
        held.settle(len(prompt), stop)
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        self._metrics.accepted(request.tenant, model.name, len(prompt))
        accepted = Accepted(
            request_id,
            model.name,
            len(prompt),
            seed,
            prompt if request.return_token_ids else (),
            await self._echoed(request, request_id, prompt, model, held, stages),
            await self._score(request, request_id, prompt, model, held, stages),
            trace_id=stages.trace.context.trace_id,
        )
        stages.trace.accepted(accepted)
        sampling = replace(request.sampling, seed=seed)
        if stages.record is not None:
            record = stages.record
            record.accepted(accepted.model, len(prompt), stop)
            if self._config.keep_replays:
                record.replay = Replay(
                    model, packed(prompt), request.n, sampling, stop, request.grammar
                )
        if not stop.max_tokens:
            return Prepared(None, accepted)
        request_state = RequestState(
            request_id,
            prompt,
            n=request.n,
            sampling=sampling,
            stop=stop,
            max_fruitless_attempts=self._config.max_attempts,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            grammar=request.grammar,
        )
        options = TextOptions(
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            kept_special_tokens=answers.markers if answers is not None else (),
            prompt_tail_ids=prompt[-PROMPT_TAIL:],
            min_tokens=request.min_tokens,
            shown_stop_token_ids=frozenset(request.stop_token_ids),
            traceparent=stages.trace.context.traceparent,
        )
        runner = self._runner(
            request_state, model, options, held, stages, hashes, on_placed=held.on_placed
        )
        parts = answers.deltas(request.n, prompt, seed) if answers is not None else ()
        return Prepared(runner, accepted, parts)

    async def tokenize(
        self, held: Permit, on_names: Callable[[Sequence[str]], None] | None
    ) -> tuple[EncodedPrompt, ModelDescription]:
        """See `Pipeline`. Raises BatonError."""
        request, asked_by = held.request, _asked_by(held, new_id())
        model = await self._model(request.model, asked_by.request_id)
        encoded = await self._tokenizers.encode(
            request.prompt,
            b"",
            model,
            asked_by,
            size=held.input_bytes,
            on_turn=held.grant.encoding,
        )
        ids = encoded.token_ids
        held.grant.encoded(len(ids))
        # In parts: all names of a long text at once would be too much for this loop.
        for start in range(0, len(ids) if on_names is not None else 0, NAMED_AT_ONCE):
            some = ids[start : start + NAMED_AT_ONCE]
            names = await self._tokenizers.names(some, model, asked_by)
            assert on_names is not None
            on_names(names)
        return encoded, model

    async def detokenize(self, held: Permit) -> str:
        """The text of a request's TokenPrompt, special tokens included. Raises BatonError."""
        request, asked_by = held.request, _asked_by(held, new_id())
        model = await self._model(request.model, asked_by.request_id)
        assert isinstance(request.prompt, TokenPrompt)
        return await self._tokenizers.decode(
            request.prompt.token_ids,
            model,
            asked_by,
            skip_special_tokens=False,
            on_turn=held.grant.encoding,
        )

    async def close(self) -> None:
        """Whoever waits is ended by its own request."""
        await self._tokenizers.close()

    async def _check_tools(
        self,
        request: Request,
        encoded: EncodedPrompt,
        request_id: str,
        model: ModelDescription,
        held: Permit,
        stages: StageTimer,
    ) -> None:
        """Raises InvalidArgument (`tools`) where no grammar comes of them.

        It depends on the prompt, so it is asked for after it; a token is the shortest question.
        """
        shortest = TokenPrompt(encoded.token_ids[:1])
        try:
            await self._tokenizers.encode(
                shortest,
                b"",
                model,
                _asked_by(held, request_id, stages.trace.stage_context),
                size=0,
                grammar=request.grammar,
            )
        except InvalidArgument as error:
            raise InvalidArgument(
                f"tools have parameters that cannot be followed: {error.message}", field="tools"
            ) from error

    async def _echoed(
        self,
        request: Request,
        request_id: str,
        prompt: tuple[int, ...],
        model: ModelDescription,
        held: Permit,
        stages: StageTimer,
    ) -> str:
        """The prompt's text, if the request asks for it."""
        if not request.echo:
            return ""
        if isinstance(request.prompt, TextPrompt) and request.truncate_prompt_tokens is None:
            return request.prompt.text
        return await self._tokenizers.decode(
            prompt,
            model,
            _asked_by(held, request_id, stages.trace.stage_context),
            skip_special_tokens=request.skip_special_tokens,
        )

    async def _score(
        self,
        request: Request,
        request_id: str,
        prompt: tuple[int, ...],
        model: ModelDescription,
        held: Permit,
        stages: StageTimer,
    ) -> tuple[TokenLogprobs, ...]:
        """Nothing, unless the request asks for its prompt's log-probabilities."""
        if request.prompt_logprobs is None:
            return ()
        speller = Speller(self._fleet, self._config.max_attempts, self._config.wait_timeout_s)
        request_state = scoring_request_state(
            request, request_id, prompt, self._config.max_attempts
        )
        # Without hashes: what is cached of it does not shorten it.
        own = StageTimer(now(), stages.trace.part(SCORE))
        runner = self._runner(request_state, model, UNREAD, held, own, b"", on_placed=lambda: None)
        try:
            return await score(runner, speller, model.tokenizer_digest, held.deadline)
        except BaseException as failure:
            own.over(failure)
            raise
        finally:
            own.over(None)

    def _runner(
        self,
        request_state: RequestState,
        model: ModelDescription,
        options: TextOptions,
        held: Permit,
        stages: StageTimer,
        prefix_hashes: bytes,
        *,
        on_placed: Callable[[], None],
    ) -> RequestRunner:
        standing = QueueEntry(
            tenant=held.request.tenant,
            priority=held.request.priority,
            cost=held.grant.cost,
            since=asyncio.get_running_loop().time(),
            deadline=held.deadline,
            on_placed=on_placed,
        )
        return RequestRunner(
            self._fleet,
            request_state,
            model,
            options,
            self._limits,
            self._dispatcher,
            standing,
            self._guards,
            deadline=held.deadline,
            prefix_hashes=prefix_hashes,
            stages=stages,
            background=self._background,
            metrics=self._metrics,
            pace=self._pace,
            later=self._later,
        )

    async def _model(self, name: str, request_id: str) -> ModelDescription:
        """The model to use; waits while no worker is there to ask."""
        if name and self._config.model and name != self._config.model:
            raise ModelNotFound("There is no such model here.", field="model")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._config.wait_timeout_s
        while True:
            models = self.models()
            for model in models:
                if name in ("", model.name):
                    # One more look: of one name there may be two, of which this request gets one.
                    return self._fleet.model_for(request_id, model.name) or model
            if models:
                raise ModelNotFound("There is no such model here.", field="model")
            left = give_up - loop.time()
            if left <= 0:
                raise Unavailable("No worker is ready.", retry_after_s=1.0)
            await self._fleet.changed.wait(left)


def _asked_by(held: Permit, request_id: str, trace: TraceContext = UNTRACED) -> AskedBy:
    return AskedBy(request_id, held.request.tenant, held.deadline, trace)


def new_id() -> str:
    return secrets.token_hex(12)
