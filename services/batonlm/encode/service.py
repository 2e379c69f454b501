"""The gRPC service of an encode worker, and the one thread that runs its model.

There is no timer: what waits when the model becomes free makes the next batches, up to a budget of
tokens, so that batches are large only under load and a lone text never waits for others. What is
taken together is sorted by length first, because a batch computes its padding, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import torch

from batonlm.core.errors import BatonError, Internal, InvalidArgument
from batonlm.core.request.request import TextPair, VectorInput
from batonlm.core.request.validation import wrong
from batonlm.encode.model import EncoderModel, Sequences
from batonlm.rpc import tracing
from batonlm.rpc.accepted_inputs import MAX_INPUTS, AcceptedInputs
from batonlm.rpc.convert import error_to_proto, token_ids_from_bytes
from batonlm.rpc.errors import about_call
from batonlm.rpc.metrics import STEP_SEQUENCES, VECTOR_TOKENS, counter, histogram
from batonlm.rpc.tracing import OFF, Tracer, context_of, ending
from batonlm.v1 import encode_pb2 as pb
from batonlm.v1 import encode_pb2_grpc

log = logging.getLogger(__name__)

TAKEN_TOKENS = 16384
"""Tokens that are taken together, to be sorted by length."""

BATCH_TOKENS = 4096
"""Tokens of a batch, with its padding. On a CPU it computes no faster with more, and on a GPU so
many keep a model of the usual size busy."""


class _Job(NamedTuple):
    sequence: Sequences
    done: asyncio.Future[torch.Tensor]


class ModelThread:
    """Runs a model on one thread, batch after batch. Used on one event loop."""

    def __init__(self, executor: ThreadPoolExecutor, model: EncoderModel) -> None:
        """executor: of one thread."""
        self._executor = executor
        self._model = model
        self._waiting: deque[_Job] = deque()
        self._busy = False
        self.waiting_tokens = 0

    async def vector(self, sequence: Sequences) -> torch.Tensor:
        """[size]. An input whose caller is cancelled while it waits is skipped."""
        done: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(sequence, done))
        self.waiting_tokens += len(sequence.ids)
        self._dispatch()
        return await done

    def _dispatch(self) -> None:
        if self._busy:
            return
        jobs: list[_Job] = []
        taken = 0
        while self._waiting and (not jobs or taken < TAKEN_TOKENS):
            job = self._waiting.popleft()
            self.waiting_tokens -= len(job.sequence.ids)
            if not job.done.done():
                taken += len(job.sequence.ids)
                jobs.append(job)
        if not jobs:
            return
        self._busy = True
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, self._work_off, jobs, loop)
        running.add_done_callback(lambda over: self._over(jobs, over))

    def _work_off(self, jobs: Sequence[_Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the model's thread; gives back each batch as soon as it is computed."""
        sequences = [job.sequence for job in jobs]
        for indexes, numbers in self._model.compute(sequences, BATCH_TOKENS):
            histogram(STEP_SEQUENCES).observe(len(indexes))
            counter(VECTOR_TOKENS).inc(sum(len(sequences[index].ids) for index in indexes))
            done = [jobs[index].done for index in indexes]
            loop.call_soon_threadsafe(_give_back, done, numbers)

    def _over(self, jobs: Sequence[_Job], over: asyncio.Future[None]) -> None:
        self._busy = False
        failure = None if over.cancelled() else over.exception()
        if failure is not None:
            log.error("a batch failed", exc_info=failure)
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(Internal("The model failed on this input."))
        self._dispatch()


def _give_back(done: Sequence[asyncio.Future[torch.Tensor]], numbers: torch.Tensor) -> None:
    for future, row in zip(done, numbers, strict=True):
        if not future.done():
            future.set_result(row)


class EncodeServicer(encode_pb2_grpc.EncodeServicer):
    """Serves `baton.v1.Encode`.

    tokenizing: the threads that tokenize, beside the model's.
    """

    def __init__(
        self,
        model: EncoderModel,
        thread: ModelThread,
        tokenizing: ThreadPoolExecutor,
        tracer: Tracer = OFF,
    ) -> None:
        self._model = model
        self._thread = thread
        self._tokenizing = tokenizing
        self._tracer = tracer
        self.inputs = AcceptedInputs("encode worker")

    async def Run(
        self,
        request: pb.EncodeRunRequest,
        context: grpc.aio.ServicerContext[pb.EncodeRunRequest, pb.EncodeRunResponse],
    ) -> pb.EncodeRunResponse:
        if len(request.inputs) > MAX_INPUTS:
            raise wrong("inputs", f"must be at most {MAX_INPUTS}")
        parent = context_of(context.invocation_metadata() or ())
        with self.inputs.accepted(len(request.inputs), request.ByteSize()):
            try:
                with ending(self._tracer.go_on(tracing.VECTORS, parent=parent)):
                    return await self._outputs(request)
            except Internal as error:
                log.error("inputs failed", exc_info=error, extra=about_call(context))
                raise

    async def _outputs(self, request: pb.EncodeRunRequest) -> pb.EncodeRunResponse:
        model = self._model
        size = request.dimensions or model.size
        if size > model.size:
            raise wrong("dimensions", f"must be at most {model.size} with this model")
        parts = [_parts(each, model, request.prompt_name) for each in request.inputs]
        # What several inputs have in common, such as a query, is computed once.
        texts = list(dict.fromkeys(part for each in parts for part in each))
        truncate = request.truncate_tokens if request.HasField("truncate_tokens") else None
        made = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, model.tokenize, texts, truncate
        )
        results = await asyncio.gather(*map(self._computed, made))
        found = dict(zip(texts, results, strict=True))
        return pb.EncodeRunResponse(
            outputs=[_output(model, [found[part] for part in each], size) for each in parts]
        )

    async def _computed(self, made: Sequences | BatonError) -> _Computed | BatonError:
        if isinstance(made, BatonError):
            return made
        return _Computed(await self._thread.vector(made), len(made.ids))


class _Computed(NamedTuple):
    numbers: torch.Tensor
    """[size]."""
    num_tokens: int


def _parts(each: pb.VectorInput, model: EncoderModel, prompt_name: str) -> tuple[VectorInput, ...]:
    """What is computed for an input: two texts where a model of vectors scores a pair, by their
    cosine. Raises InvalidArgument."""
    match each.WhichOneof("input"):
        case "text" if not model.scores:
            return (model.prompt(prompt_name) + each.text,)
        case "token_ids" if not model.scores:
            return (token_ids_from_bytes(each.token_ids, "input"),)
        case "pair" if model.scores:
            return (TextPair(each.pair.query, each.pair.document),)
        case "pair":
            return (
                model.prompt_for("query") + each.pair.query,
                model.prompt_for("document") + each.pair.document,
            )
        case None:
            raise wrong("input", "must be text, token ids or a pair")
        case _:
            raise InvalidArgument("this model scores pairs and makes no vectors", field="model")


def _output(
    model: EncoderModel, computed: Sequence[_Computed | BatonError], size: int
) -> pb.VectorOutput:
    for each in computed:
        if isinstance(each, BatonError):
            return pb.VectorOutput(error=error_to_proto(each))
    sound = [each for each in computed if isinstance(each, _Computed)]
    numbers = torch.stack([each.numbers for each in sound])
    if len(sound) == 2:
        numbers = torch.nn.functional.cosine_similarity(numbers[0], numbers[1], dim=0).view(1)
    elif not model.scores:
        numbers = model.shortened(numbers, size)
    return pb.VectorOutput(
        # On a machine of another byte order numpy swaps them.
        numbers=numbers.flatten().numpy().astype("<f4").tobytes(),
        num_tokens=sum(each.num_tokens for each in sound),
    )
