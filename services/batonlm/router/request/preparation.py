"""Prepares an admitted request: from the Request to a RequestRunner that is not started yet.

choose the model → encode → check the model's limits → draw the seed → settle the admission charge →
score the prompt, if requested → RequestRunner
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import (
    BatonError,
    InvalidArgument,
    NotFound,
    Overloaded,
    Unavailable,
    model_not_found,
)
from batonlm.core.observe.request_record import Replay, packed
from batonlm.core.observe.stages import Stage
from batonlm.core.request.answers import AnswerDeltas, AnswerRules
from batonlm.core.request.attempt import Attempt
from batonlm.core.request.first_attempt import (
    check_size,
    check_vocabulary,
    first_attempt,
    resolve_stop,
    scoring,
    seed_of,
    truncated,
)
from batonlm.core.request.model import AdapterDescription, ModelDescription, ModelTask
from batonlm.core.request.request import (
    Accepted,
    TextPrompt,
    TokenLogprobs,
    TokenPrompt,
    VectorPrompt,
)
from batonlm.core.request.request_state import RequestState
from batonlm.core.request.validation import is_adapter_name
from batonlm.core.routing.adapters import adapter_for
from batonlm.core.routing.aliases import Alias, conversation
from batonlm.core.routing.routing import models_of
from batonlm.core.routing.step_back import StepBack
from batonlm.router.observe.stage_timer import StageTimer
from batonlm.router.request.admission import RequestContext, RouterServices
from batonlm.router.request.runner import RequestRunner
from batonlm.router.request.texts import PROMPT_TAIL, Texts, TokenBytes
from batonlm.router.workers.encoders import Encoders, Vectors
from batonlm.router.workers.tokenizers import EncodedPrompt, Tokenizers
from batonlm.rpc.convert import token_ids_to_bytes
from batonlm.rpc.tracing import SCORE, now
from batonlm.v1.detokenizer_pb2 import OpenText

WORDED_AT_ONCE = 1024
"""Log-probability entries that are converted to text before the event loop yields."""


NAMED_AT_ONCE = 4096
"""Tokens whose names are requested together."""


class Prepared(NamedTuple):
    """A request that is ready to run."""

    runner: RequestRunner
    accepted: Accepted
    parts: tuple[AnswerDeltas, ...] = ()
    """The splitter of each choice's deltas; empty: deltas are passed on unchanged."""


RETRY_HELD_S = 5.0
HELD_SHARE = 4
"""A tenant may have one in so many of a router's requests wait for one model."""


class HeldRequests:
    """Requests that wait for the first worker of their model, or for an adapter on it."""

    def __init__(self, most_of_tenant: int) -> None:
        """most_of_tenant: for each model."""
        self.by_model = Counter[str]()
        self._most = most_of_tenant
        self._by_tenant = Counter[tuple[str, str, str]]()

    @contextmanager
    def one(self, tenant: Tenant) -> Iterator[Callable[[str], None]]:
        """Yields what counts a request as waiting for a model until the block ends. Only its first
        call counts. It raises Overloaded for one too many of its tenant: whoever asks for a model
        that does not start leaves room for requests for others."""
        waits: tuple[str, str, str] | None = None

        def count(model: str) -> None:
            nonlocal waits
            if waits is not None:
                return
            key = model, tenant.name, tenant.address
            if self._by_tenant[key] >= self._most:
                text = "Too many requests wait for this model already."
                raise Overloaded(text, retry_after_s=RETRY_HELD_S)
            waits = key
            self.by_model[model] += 1
            self._by_tenant[key] += 1

        try:
            yield count
        finally:
            if waits is not None:
                self.by_model -= Counter([waits[0]])
                self._by_tenant -= Counter([waits])


class Preparation:
    """Prepares the requests of one router."""

    def __init__(
        self, services: RouterServices, aliases: Callable[[], Mapping[str, Alias]]
    ) -> None:
        self._services = services
        self._aliases = aliases
        self.step_back = StepBack()
        self._seen_aliases: Mapping[str, Alias] = {}
        self.held = HeldRequests(max(1, services.config.max_requests // HELD_SHARE))
        config = services.config
        self._answer_rules = AnswerRules(config.tool_format, config.reasoning_format)
        self._tokenizers = Tokenizers(services.fleet, config, services.budget)
        self._encoders = Encoders(services.fleet, config, services.budget)

    def reasons(self, model: ModelDescription) -> bool:
        """Whether the model's answers may have reasoning, as its tokenizers know."""
        return any(
            self._answer_rules.reasoning_of(worker.model.answer_format) is not None
            for worker in self._services.fleet.tokenizers.each_snapshot()
            if worker.model.tokenizer_digest == model.tokenizer_digest
        )

    def encode_models(self) -> list[ModelDescription]:
        """The models of which vectors or scores can be requested now."""
        return self._encoders.models()

    def adapters(self) -> list[tuple[ModelDescription, AdapterDescription]]:
        """The adapters that can be requested now, sorted by name, each with its model."""
        fleet, held = self._services.fleet, set[str]()
        for worker in fleet.decodes.each_snapshot():
            held |= worker.adapters
        found = {
            (model.name, adapter.name): (model, adapter)
            for model in self.models()
            for adapter in chain(self._used_adapters(model), fleet.adapters.of(model.digest))
            if adapter.digest in held
        }
        return sorted(found.values(), key=lambda pair: pair[1].name)

    def _used_adapters(self, model: ModelDescription) -> Iterator[AdapterDescription]:
        """Yields those that decode workers have because requests named them."""
        for worker in self._services.fleet.decodes.each_snapshot():
            if worker.model.digest == model.digest:
                yield from worker.used_adapters.values()

    def models(self) -> list[ModelDescription]:
        """The models that generate and can be requested now."""
        expected = self._services.config.model
        served = models_of(self._services.fleet.decodes.snapshots())
        return [model for model in served if not expected or model.name in expected]

    async def prepare(self, context: RequestContext) -> Prepared:
        """Raises BatonError."""
        services, stages, request = self._services, context.stages, context.request
        services.budget.started()
        model, adapter = await self._model(context)
        name, digest = model.name, ""
        if adapter is not None:
            name = context.adapter = adapter.name
            digest = adapter.digest
        encoded = await self._tokenizers.encode(
            request.prompt,
            request.cache_salt,
            model,
            context.caller,
            size=context.input_bytes,
            grammar=request.grammar,
            adapter=digest,
            most_tokens=model.max_model_len if request.truncate_prompt_tokens is None else None,
            on_turn=context.charge.encoding,
            on_served=stages.served_by,
        )
        context.charge.encoded(encoded.too_many or len(encoded.token_ids))
        if encoded.too_many:
            resolve_stop(request, encoded.too_many, model)
        answers = self._answer_rules.of(
            request, encoded.answer_format, left_open=encoded.reasoning_open
        )
        if answers is not None:
            grammar = answers.grammar(request.grammar)
            if grammar is not None and grammar is not request.grammar:
                request = context.request = replace(request, grammar=grammar)
                await self._check_tools(context, encoded.token_ids[:1], model)
        stages.reached(Stage.TURN)
        prompt, hashes = truncated(request, encoded.token_ids, encoded.prefix_hashes, model)
        stop = resolve_stop(request, len(prompt), model)
        if answers is not None:
            stop = answers.ending(stop, model)
        check_vocabulary(request, model)
        check_size(request, len(prompt))
        context.controller.settle(context, len(prompt), stop, model.name)
        seed = seed_of(request, context.stream_id)
        services.metrics.accepted(request.tenant, model.name, len(prompt))
        if adapter is not None:
            services.metrics.adapter_accepted(name, len(prompt))
        first = first_attempt(request, context.request_id, prompt, seed, stop, digest)
        accepted = Accepted(
            context.request_id,
            name,
            len(prompt),
            seed,
            prompt if request.return_token_ids else (),
            await self._echoed(context, prompt, model),
            await self._score(context, first, model),
            trace_id=stages.trace.context.trace_id,
        )
        stages.trace.accepted(accepted)
        if stages.record is not None:
            stages.record.accepted(accepted.model, len(prompt), stop)
            # What a replay runs on has no adapters.
            if services.config.keep_replays and adapter is None:
                stages.record.replay = Replay(
                    model, packed(prompt), request.n, first.sampling, stop, request.grammar
                )
        opening = OpenText(
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            kept_special_tokens=answers.markers if answers is not None else (),
            prompt_tail_ids=token_ids_to_bytes(prompt[-PROMPT_TAIL:]),
            min_tokens=request.min_tokens,
            traceparent=stages.trace.context.traceparent,
        )

        def on_placed() -> None:
            if not context.was_placed:
                services.metrics.placed(model.name)
            context.on_placed()

        runner = RequestRunner(
            services,
            context,
            RequestState(first, services.config.max_attempts),
            model,
            opening,
            prefix_hashes=hashes,
            on_placed=on_placed,
            stream_id=context.stream_id if request.may_go_on_elsewhere else "",
        )
        parts = answers.deltas(request.n, prompt, seed) if answers is not None else ()
        return Prepared(runner, accepted, parts)

    async def tokenize(
        self, context: RequestContext, on_names: Callable[[Sequence[str]], None] | None
    ) -> tuple[EncodedPrompt, ModelDescription]:
        """See `Pipeline.tokenize`. Raises BatonError."""
        model, _ = await self._model(context)
        encoded = await self._tokenizers.encode(
            context.request.prompt,
            b"",
            model,
            context.caller,
            size=context.input_bytes,
            on_turn=context.charge.encoding,
        )
        ids = encoded.token_ids
        context.charge.encoded(len(ids))
        # In parts: all names of a long text at once would block the event loop.
        for start in range(0, len(ids) if on_names is not None else 0, NAMED_AT_ONCE):
            some = ids[start : start + NAMED_AT_ONCE]
            names = await self._tokenizers.names(some, model, context.caller)
            assert on_names is not None
            on_names(names)
        return encoded, model

    async def detokenize(self, context: RequestContext) -> str:
        """Returns the text of a request's TokenPrompt, including special tokens. Raises
        BatonError."""
        model, _ = await self._model(context)
        assert isinstance(context.request.prompt, TokenPrompt)
        return await self._tokenizers.decode(
            context.request.prompt.token_ids,
            model,
            context.caller,
            skip_special_tokens=False,
            on_turn=context.charge.encoding,
        )

    async def vectors(self, context: RequestContext) -> Vectors:
        """See `Pipeline.vectors`. Raises BatonError."""
        services, request, stages = self._services, context.request, context.stages
        prompt = request.prompt
        assert isinstance(prompt, VectorPrompt)
        services.budget.started()
        task = ModelTask.SCORE if prompt.scores else ModelTask.EMBED
        model = await self._encoders.model(request.model, task)
        stages.reached(Stage.TURN)
        found = await self._encoders.run(
            prompt,
            model,
            context.caller,
            on_turn=context.charge.encoding,
            on_served=stages.served_by,
        )
        context.charge.encoded(found.num_tokens)
        services.metrics.computed(request.tenant, model.name, found.num_tokens)
        if stages.record is not None:
            stages.record.computed(model.name, found.num_tokens)
        return found

    async def close(self) -> None:
        """Stops the queues for tokenizers and encode workers. Waiting tasks are ended by their own
        requests."""
        await self._tokenizers.close()
        await self._encoders.close()

    async def _check_tools(
        self, context: RequestContext, shortest: tuple[int, ...], model: ModelDescription
    ) -> None:
        """Raises InvalidArgument (`tools`) when the tools yield no valid grammar.

        The grammar depends on the prompt, so it is checked after encoding, with the shortest
        prompt.
        """
        try:
            await self._tokenizers.encode(
                TokenPrompt(shortest),
                b"",
                model,
                context.caller,
                size=0,
                grammar=context.request.grammar,
            )
        except InvalidArgument as error:
            raise InvalidArgument(
                f"tools have parameters that cannot be followed: {error.message}", field="tools"
            ) from error

    async def _echoed(
        self, context: RequestContext, prompt: tuple[int, ...], model: ModelDescription
    ) -> str:
        """Returns the prompt's text, if the request asks for it."""
        request = context.request
        if not request.echo:
            return ""
        if isinstance(request.prompt, TextPrompt) and request.truncate_prompt_tokens is None:
            return request.prompt.text
        return await self._tokenizers.decode(
            prompt, model, context.caller, skip_special_tokens=request.skip_special_tokens
        )

    async def _score(
        self, context: RequestContext, first: Attempt, model: ModelDescription
    ) -> tuple[TokenLogprobs, ...]:
        """Returns the log-probabilities of the prompt's tokens, if the request asks for them; the
        first entry has no meaning.

        They come from a separate run before the request's own, on the same fleet (`scoring`).
        """
        num_top = context.request.prompt_logprobs
        if num_top is None:
            return ()
        stages = StageTimer(now(), context.stages.trace.part(SCORE))
        context = replace(context, request_id=f"{context.request_id}-prompt", stages=stages)
        prompt = first.token_ids
        runner = RequestRunner(
            self._services,
            context,
            RequestState(
                scoring(first, context.request_id, num_top), self._services.config.max_attempts
            ),
            model,
            OpenText(),
            prefix_hashes=b"",
            on_placed=lambda: None,
        )
        try:
            await runner.run()
            found = runner.prompt_logprobs
            if found is None:
                # The stream of the decode worker broke meanwhile, and only its token was sent
                # again.
                raise Unavailable("The prompt's log-probabilities were lost.", retry_after_s=1.0)
            words = TokenBytes(chain(prompt, found.alternatives()))
            digest = model.tokenizer_digest
            await Texts(self._services, context, [words], digest, lambda _: None).keep()
            entries = []
            for entry in found.worded(prompt, words.spelled.__getitem__):
                entries.append(entry)
                if not len(entries) % WORDED_AT_ONCE:
                    await asyncio.sleep(0)
            return tuple(entries)
        except BaseException as failure:
            stages.over(failure)
            raise
        finally:
            stages.over(None)

    async def _use(
        self, name: str, models: Iterable[str], held: Callable[[str], None], give_up: float
    ) -> bool:
        """Has a model's workers load an adapter that a request names. Returns whether one of the
        models has it now. held: counts the request as one that waits. Raises BatonError where there
        is one that cannot be loaded."""
        failure: BatonError | None = None
        for model in models:
            left = give_up - asyncio.get_running_loop().time()
            if left <= 0:
                break
            try:
                held(model)
                await self._services.adapters.use(name, model, left)
                return True
            except NotFound:
                continue
            except BatonError as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    async def _model(
        self, context: RequestContext
    ) -> tuple[ModelDescription, AdapterDescription | None]:
        """Returns the model to use, with the adapter if the request names one; waits while there is
        no worker that may serve it."""
        name, config, fleet = context.request.model, self._services.config, self._services.fleet
        aliases = self._aliases()
        if aliases is not self._seen_aliases:
            self.step_back.keep(aliases)
            self._seen_aliases = aliases
        if config.model and not name:
            name = config.model[0]
        alias, key = aliases.get(name), b""
        if alias is not None and fleet.adapters.knows(name):
            raise InvalidArgument(
                f"{name!r} is the name of an adapter, and stands for other models: write it as "
                f"MODEL:{name}, or give one of both another name.",
                field="model",
            )
        if alias is not None:
            alias = self.step_back.now(name, alias)
            context.alias, key = name, conversation(context.request)
        base, _, adapter_name = name.rpartition(":")
        names_adapter = is_adapter_name(adapter_name)
        base_alias = aliases.get(base)
        if base_alias is not None:
            base_alias = self.step_back.now(base, base_alias)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + config.wait_timeout_s
        with self.held.one(context.request.tenant) as held:
            while True:
                models = self.models()
                served = {model.name for model in models}
                if alias is not None:
                    name = alias.model(key, served)
                for model in models:
                    if name in ("", model.name):
                        # Looks again: of one name there may be two models, and this request gets
                        # one of them.
                        return fleet.model_for(context.stream_id, model.name) or model, None
                if base_alias is not None:
                    base = base_alias.model(conversation(context.request), served)
                bases = served if not base else served & {base}
                decodes = [w for w in fleet.decodes.snapshots() if w.model.name in bases]
                adapter = adapter_for(context.stream_id, adapter_name, decodes, fleet.adapters)
                if adapter is not None and alias is None:
                    return adapter
                # An adapter that no decode worker has now may come back, and so may a model that
                # this router was told of, with its adapters.
                known = any(fleet.adapters.named(w.model.digest, adapter_name) for w in decodes)
                absent = {*config.model} - served
                if base in absent or (absent and not base):
                    known = known or fleet.adapters.knows(adapter_name)
                if alias is None and not known and name not in config.model and names_adapter:
                    on_use = dict.fromkeys(w.model.name for w in decodes if w.loads_on_use)
                    if await self._use(adapter_name, on_use, held, give_up):
                        continue
                told = config.model or (served if alias is None else ())
                if told and name not in told and (alias is not None or not known):
                    adapters = {each.name for _, each in self.adapters()}
                    raise model_not_found(name, {*told, *aliases, *adapters})
                left = give_up - loop.time()
                if left <= 0 or not fleet.decodes.awaited:
                    raise fleet.decodes.absent(model=bool(models))
                held(base if base in absent else name)
                await fleet.changed.wait(left)
