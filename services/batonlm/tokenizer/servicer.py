"""The gRPC service of the tokenizer, and the executor that batches its work on threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import grpc

from batonlm.core.errors import BatonError, InvalidArgument, Overloaded
from batonlm.core.request.model import ModelDescription, WorkerIdentity
from batonlm.core.request.request import Prompt, TextPrompt, TokenPrompt
from batonlm.core.request.validation import wrong
from batonlm.rpc import tracing
from batonlm.rpc.accepted_inputs import MAX_INPUTS, MAX_WAITING_BYTES, AcceptedInputs
from batonlm.rpc.convert import (
    chat_from_proto,
    error_to_proto,
    grammar_from_proto,
    identity_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from batonlm.rpc.errors import about_call
from batonlm.rpc.metrics import ENCODED_TOKENS, counter
from batonlm.rpc.tracing import OFF, Span, Tracer, context_of, ending
from batonlm.tokenizer.encoder import Asked, Encoded, Encoder
from batonlm.tokenizer.grammar_checker import Checker
from batonlm.v1 import tokenizer_pb2 as pb
from batonlm.v1 import tokenizer_pb2_grpc
from batonlm.v1.types_pb2 import Error

Item = TypeVar("Item")
Output = TypeVar("Output")

LONG_BYTES = 1 << 16
LONG_NICE = 10
"""The nice value of threads for long inputs: about a tenth of another thread's CPU share."""
BATCH_BYTES = 1 << 14
BATCH_JOBS = 64


class _Job(NamedTuple):
    work: Callable[[Sequence[Any]], Sequence[Any]]
    item: Any
    size: int
    done: asyncio.Future[Any]


class BatchExecutor:
    """Runs short and long inputs side by side on a few threads. Used on one event loop.

    A thread takes several short inputs at once, since handing one over costs more than encoding a
    short text. A long input runs alone, and long ones never occupy all threads, so that a text that
    takes seconds does not block short ones. Both kinds run in order of arrival. There is no timer:
    all that waits when a thread becomes free makes a batch, so that batches are large only under
    load.

    threads: the most that run at once, at least 2 to keep one for short inputs. cores: the most
    threads for short inputs, because two of them on one core only slow each other down.
    long_executor: the threads for long inputs; None: `executor`.
    """

    def __init__(
        self, executor: Executor, threads: int, cores: int, long_executor: Executor | None = None
    ) -> None:
        self._executor = executor
        self._long_executor = long_executor or executor
        self._threads = threads
        self._cores = cores
        self._short: deque[_Job] = deque()
        self._long: deque[_Job] = deque()
        self._running = 0
        self._running_long = 0

    async def run(
        self, work: Callable[[Sequence[Item]], Sequence[Output | Exception]], item: Item, size: int
    ) -> Output:
        """Calls `work` with the item and possibly others, and returns its result for the item, or
        raises it if it is an exception. size: in bytes, or LONG_BYTES for an item that may take
        long in spite of its size. An item whose caller is cancelled while it waits is skipped.
        """
        done: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        (self._short if size < LONG_BYTES else self._long).append(_Job(work, item, size, done))
        self._dispatch()
        return await done

    def _dispatch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < self._threads and (jobs := self._next()):
            long = jobs[0].size >= LONG_BYTES
            self._running += 1
            self._running_long += long
            executor = self._long_executor if long else self._executor
            batch = loop.run_in_executor(executor, _work_off, jobs)
            batch.add_done_callback(partial(self._ended, jobs, long))

    def _next(self) -> list[_Job]:
        """The next batch; empty when nothing may begin now."""
        for waiting in (self._short, self._long):
            while waiting and waiting[0].done.done():
                waiting.popleft()
        # One long job may always run, and more only while no short ones wait: neither kind starves.
        if self._long and (
            not self._running_long or (not self._short and self._running_long < self._threads - 1)
        ):
            return [self._long.popleft()]
        jobs: list[_Job] = []
        free_cores = self._cores - (self._running - self._running_long)
        if free_cores <= 0:
            return jobs
        room = BATCH_BYTES
        # Short jobs are spread over the free threads.
        free = min(self._threads - self._running, free_cores)
        share = min(BATCH_JOBS, -(-len(self._short) // free))
        while self._short and len(jobs) < share and (room >= self._short[0].size or not jobs):
            job = self._short.popleft()
            if not job.done.done():
                room -= job.size
                jobs.append(job)
        return jobs

    def _ended(
        self, jobs: Sequence[_Job], long: bool, batch: asyncio.Future[Sequence[Any]]
    ) -> None:
        self._running -= 1
        self._running_long -= long
        if batch.cancelled():
            results: Sequence[Any] = [CancelledError()] * len(jobs)
        elif error := batch.exception():
            results = [error] * len(jobs)
        else:
            results = batch.result()
        for job, result in zip(jobs, results, strict=True):
            if job.done.done():
                continue
            if isinstance(result, BaseException):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)
        self._dispatch()


def give_way() -> None:
    """Lowers the calling thread's priority. Otherwise a thread that encodes a megabyte for a second
    would compete with event loops, of this process and of others."""
    with suppress(OSError):  # where threads have no priorities of their own
        thread = threading.get_native_id()
        nice = max(LONG_NICE, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def _work_off(jobs: Sequence[_Job]) -> Sequence[Any]:
    """Runs on a thread of the executor; returns a result or an exception for each job. If `work`
    itself raises, the whole batch fails."""
    results: list[Any] = []
    for work, group in groupby(jobs, key=attrgetter("work")):
        results += work([job.item for job in group])
    return results


MAX_SALT_BYTES = 1024
MAX_ADAPTER_LETTERS = 128
"""Of an adapter's digest."""


class EncodeJob:
    """The work that a BatchExecutor runs: groups of input messages to groups of outputs. An input
    that fails has its error in place of an output."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(
        self, groups: Sequence[Sequence[pb.EncodeInput]]
    ) -> list[list[pb.EncodeOutput | BatonError]]:
        asked = [_asked(item) for group in groups for item in group]
        answers = iter(self._encoder.encode([ask for ask in asked if isinstance(ask, Asked)]))
        results = iter(next(answers) if isinstance(ask, Asked) else ask for ask in asked)
        return [[self._encoded(item, next(results)) for item in group] for group in groups]

    def decode(
        self, groups: Sequence[Sequence[pb.DecodeInput]]
    ) -> list[list[pb.DecodeOutput | BatonError]]:
        return [[self._decoded(item) for item in group] for group in groups]

    def _encoded(
        self, item: pb.EncodeInput, result: Encoded | BatonError
    ) -> pb.EncodeOutput | BatonError:
        if isinstance(result, BatonError):
            return result
        counter(ENCODED_TOKENS).inc(len(result.token_ids))
        return pb.EncodeOutput(
            token_ids=token_ids_to_bytes(result.token_ids),
            prefix_hashes=result.prefix_hashes,
            reasoning_open=result.reasoning_open,
            token_strings=self._encoder.names(result.token_ids) if item.with_token_strings else (),
        )

    def _decoded(self, item: pb.DecodeInput) -> pb.DecodeOutput | BatonError:
        try:
            ids = token_ids_from_bytes(item.token_ids, "tokens")
            return pb.DecodeOutput(text=self._encoder.decode(ids, item.skip_special_tokens))
        except BatonError as error:
            return error


def _asked(item: pb.EncodeInput) -> Asked | BatonError:
    try:
        if len(item.cache_salt) > MAX_SALT_BYTES:
            raise wrong("cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
        if len(item.adapter) > MAX_ADAPTER_LETTERS:
            raise wrong("adapter", f"must have at most {MAX_ADAPTER_LETTERS} letters")
        return Asked(_prompt(item), item.cache_salt, item.adapter)
    except BatonError as error:
        return error


def _prompt(item: pb.EncodeInput) -> Prompt:
    match item.WhichOneof("input"):
        case "text":
            return TextPrompt(item.text, item.add_special_tokens)
        case "chat":
            return chat_from_proto(item.chat)
        case "token_ids":
            return TokenPrompt(token_ids_from_bytes(item.token_ids, "prompt"))
        case _:
            raise wrong("input", "must be text, a chat or token ids")


log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext
_Item = TypeVar("_Item", pb.EncodeInput, pb.DecodeInput)
_Output = TypeVar("_Output", pb.EncodeOutput, pb.DecodeOutput)
_Work = Callable[[Sequence[Sequence[_Item]]], Sequence[list[_Output | BatonError]]]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServicer):
    """Serves `baton.v1.Tokenizer`.

    lanes: runs encoding and decoding. checker: checks grammars. max_waiting_bytes: the most input
    that is accepted and not answered; more is refused with Overloaded.
    """

    def __init__(
        self,
        encoder: Encoder,
        model: ModelDescription,
        identity: Callable[[], WorkerIdentity],
        lanes: BatchExecutor,
        checker: Checker,
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        tracer: Tracer = OFF,
    ) -> None:
        self._encoder = encoder
        self._work = EncodeJob(encoder)
        self._model = model
        self._identity = identity
        self._lanes = lanes
        self._checker = checker
        self._tracer = tracer
        self.inputs = AcceptedInputs("tokenizer", max_waiting_bytes)

    async def Encode(
        self,
        request: pb.EncodeRequest,
        context: _Context[pb.EncodeRequest, pb.EncodeResponse],
    ) -> pb.EncodeResponse:
        with self._traced(tracing.ENCODE, context):
            return pb.EncodeResponse(
                outputs=await self._all(
                    self._work.encode, request.inputs, pb.EncodeOutput, about_call(context)
                )
            )

    async def Decode(
        self,
        request: pb.DecodeRequest,
        context: _Context[pb.DecodeRequest, pb.DecodeResponse],
    ) -> pb.DecodeResponse:
        with self._traced(tracing.TO_TEXT, context):
            return pb.DecodeResponse(
                outputs=await self._all(
                    self._work.decode, request.inputs, pb.DecodeOutput, about_call(context)
                )
            )

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: _Context[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            identity=identity_to_proto(self._identity()),
            model=self._model.name,
            tokenizer_digest=self._model.tokenizer_digest,
            vocab_size=self._encoder.vocab_size,
            has_chat_template=self._encoder.has_chat_template,
        )

    def _traced(self, name: str, context: _Context[Any, Any]) -> AbstractContextManager[Span]:
        parent = context_of(context.invocation_metadata() or ())
        return ending(self._tracer.go_on(name, parent=parent))

    async def _all(
        self,
        work: _Work[_Item, _Output],
        inputs: Sequence[_Item],
        output: type[_Output],
        about: Mapping[str, str],
    ) -> list[_Output]:
        """An output for each input, in order. about: the call's ids, for log lines."""
        if len(inputs) > MAX_INPUTS:
            raise wrong("inputs", f"must be at most {MAX_INPUTS}")
        outputs = await asyncio.gather(
            *(self._some(work, group, size) for group, size in _groups(inputs))
        )
        return [
            output(error=_logged_error(one, about)) if isinstance(one, BatonError) else one
            for some in outputs
            for one in some
        ]

    async def _some(
        self,
        work: _Work[_Item, _Output],
        items: list[_Item],
        size: int,
    ) -> list[_Output | BatonError]:
        """The results of inputs that one thread takes together."""
        try:
            with self.inputs.accepted(len(items), size):
                refusals = [await self._refusal(item) for item in items]
                sound = [item for item, error in zip(items, refusals, strict=True) if error is None]
                done = iter(await self._lanes.run(work, sound, size) if sound else ())
                return [next(done) if error is None else error for error in refusals]
        except Overloaded as error:
            return [error] * len(items)

    async def _refusal(self, item: pb.EncodeInput | pb.DecodeInput) -> BatonError | None:
        """The error of an input's grammar; None without one, or for a valid grammar."""
        if not isinstance(item, pb.EncodeInput) or not item.HasField("grammar"):
            return None
        try:
            await self._checker.check(grammar_from_proto(item.grammar, "grammar"))
        except BatonError as error:
            return error
        return None


def _logged_error(error: BatonError, about: Mapping[str, str]) -> Error:
    """The error as a message. Internal errors are logged, and at debug level the cause of a
    refusal."""
    if not isinstance(error, InvalidArgument | Overloaded):
        log.error("an input could not be worked on", exc_info=error, extra=about)
    elif error.__cause__ is not None:
        log.debug("an input is refused", exc_info=error, extra=about)
    return error_to_proto(error)


def _groups(inputs: Sequence[_Item]) -> Iterator[tuple[list[_Item], int]]:
    """Splits inputs into batches, each with its bytes; a long input is a batch of its own."""
    group: list[_Item] = []
    total = 0
    for item in inputs:
        size = item.ByteSize()
        if isinstance(item, pb.EncodeInput) and item.chat.template:
            size = max(size, LONG_BYTES)  # a client's template may take long on any input
        if group and total + size > BATCH_BYTES:
            yield group, total
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group, total
