"""Engine, one model's engine thread and the event loop that it needs; jobs go in and come back.

In: jobs, from any thread. Out: the same jobs in `Batch.ended`, with tokens and texts, or an error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from batonlm.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Unavailable,
)
from batonlm.core.request.attempt import AttemptKey, ChoiceTokens
from batonlm.core.request.model import AdapterDescription, ModelDescription
from batonlm.core.scheduler.events import AttemptFailed, Event, KvComplete, NewTokens
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import CompiledGrammar
from batonlm.core.scheduler.policy import QueueLimit
from batonlm.core.scheduler.sequence_table import Load
from batonlm.engine.thread import EngineThread
from batonlm.grammar.book import GrammarBook
from batonlm.llm.job import Batch, Job
from batonlm.worker.adapters import AdapterFolder, WorkerAdapters
from batonlm.worker.engine import engine_loop, open_book, open_runner
from batonlm.worker.hardware import OFFLINE, settled
from batonlm.worker.options import DecodeConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 20.0
"""The longest wait for the engine to end, in seconds: more than a step may take to stop."""


class Engine:
    """The engine of one LLM, and the event loop that it needs, on two threads."""

    def __init__(self, options: DecodeConfig) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._opened: Future[ModelDescription] = Future()
        self._engine = EngineThread(self._make_loop, self._deliver)
        self._book = GrammarBook(None)
        self._jobs: dict[AttemptKey, Job] = {}
        """By the attempt that runs."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: BatonError | None = None
        """Why no more jobs are taken."""
        self.max_running = 0
        """Sequences that can run at once. Set by `open`."""
        self.adapters: dict[str, AdapterDescription] = {}
        """By name. Set by `open`."""
        self._thread = threading.Thread(target=self._main, name="llm", daemon=True)

    def open(self) -> ModelDescription:
        """Loads the model; returns what it is. Raises BatonError."""
        self._thread.start()
        try:
            return self._opened.result()
        except BaseException:
            self.close()
            raise

    def submit(self, jobs: Sequence[Job]) -> None:
        """Starts jobs, which all come back in their batches' `ended`. Raises Unavailable when
        closed."""
        self._call(self._take, jobs)

    def cancel(self, batch: Batch) -> None:
        """Ends what is unfinished of a batch."""
        with suppress(Unavailable):
            self._call(self._cancel, batch)

    def check(self) -> None:
        """Raises Unavailable when closed, Internal when the engine failed."""
        if self._over is not None:
            raise self._over
        if not self._thread.is_alive():
            raise _closed()

    @property
    def load(self) -> Load:
        return self._engine.load

    def leave(self) -> None:
        """Begins to end the threads, without waiting. May be called on any of them."""
        with suppress(Unavailable):
            self._call(self._stop.set)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self.leave()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the engine did not end within %g s", CLOSE_S)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            raise _closed() from None

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            if self._opened.done():
                log.exception("the engine's event loop ended")
            else:
                self._opened.set_exception(error)
        finally:
            self._loop.close()

    def _make_loop(self) -> EngineLoop:
        # Nobody else fills the queue, and `LLM.answers` bounds it.
        policy = replace(self._options.policy, limit=QueueLimit(sys.maxsize, sys.maxsize))
        return engine_loop(open_runner(self._options, own_process=False), policy)

    async def _live(self) -> None:
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        with settled(OFFLINE, self._options) as chosen:
            options = chosen.options
            assert isinstance(options, DecodeConfig)
            self._options, self.max_running = options, options.max_running
            log.info("%s", chosen.why)
            try:
                model = await _unless(stopped, self._load(options))
                self._book = await asyncio.to_thread(open_book, options, model)
                self._opened.set_result(model)
                await asyncio.wait(
                    {stopped, self._engine.failed}, return_when=asyncio.FIRST_COMPLETED
                )
                self._over = _closed()
                if self._engine.failed.done():
                    self._over = Internal("The engine failed; this LLM cannot go on.")
                    self._over.__cause__ = self._engine.failed.result()
            finally:
                stopped.cancel()
                self._over = self._over or _closed()
                for job in list(self._jobs.values()):
                    self._end(job, self._over)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(stopped, *self._tasks, return_exceptions=True)
                self._book.close()
                await self._engine.stop()

    async def _load(self, options: DecodeConfig) -> ModelDescription:
        """Loads the model, and the adapters beside it. Raises BatonError."""
        await self._engine.start()
        runner = await self._engine.call(lambda loop: loop.runner)
        adapters = WorkerAdapters(self._engine, runner, AdapterFolder())
        await adapters.load_given(options.adapters)
        self.adapters = {each.name: each for each in adapters.held.adapters}
        return runner.model

    def _take(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._over is not None:
                job.batch.ended.put((job, self._over))
                continue
            self._jobs[job.attempts[0].key] = job
            if job.request.deadline_s is not None:
                late = DeadlineExceeded("The request ran out of time.")
                job.timer = self._loop.call_later(job.request.deadline_s, self._end, job, late)
        self._enter(jobs)

    def _enter(self, jobs: Sequence[Job]) -> None:
        """Hands the next attempts of jobs to the scheduler."""
        task = self._loop.create_task(self._add_or_end(jobs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add_or_end(self, jobs: Sequence[Job]) -> None:
        try:
            await self._add(jobs)
        except Exception:
            fault = _fault()
            for job in jobs:
                self._end(job, fault)

    async def _add(self, jobs: Sequence[Job]) -> None:
        compiled: list[tuple[Job, CompiledGrammar | None]] = []
        for job in jobs:
            try:
                compiled.append((job, await self._book.compiled(job.attempts[0].grammar)))
            except BatonError as error:
                self._end(job, _about_tools(error) if job.tools_bind else error)
        ready = [(job, job.attempts[0], grammar) for job, grammar in compiled if self._runs(job)]

        def add(loop: EngineLoop) -> list[tuple[Job, BatonError]]:
            refused = []
            for job, attempt, grammar in ready:
                try:
                    loop.scheduler.add(attempt, time.monotonic(), grammar=grammar)
                except BatonError as error:
                    refused.append((job, error))
            return refused

        try:
            refused = await self._engine.call(add)
        except BatonError as error:
            refused = [(job, error) for job, _, _ in ready]
        for job, why in refused:
            self._end(job, why)

    def _runs(self, job: Job) -> bool:
        return bool(job.attempts) and self._jobs.get(job.attempts[0].key) is job

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case NewTokens(tokens):
                    for entry in tokens:
                        self._tokens(entry)
                case KvComplete(key, cached_tokens):
                    job = self._jobs.get(key)
                    if job is not None and event.prompt_logprobs is not None:
                        job.scores = event.prompt_logprobs
                    elif job is not None:
                        job.cached_tokens = min(cached_tokens, job.num_prompt_tokens)
                case AttemptFailed(key, _, error):
                    if (job := self._jobs.get(key)) is not None:
                        self._end(job, error)

    def _tokens(self, tokens: ChoiceTokens) -> None:
        key = AttemptKey(tokens.key.request_id, tokens.key.attempt)
        job = self._jobs.get(key)
        if job is None:
            return
        if job.attempts[0].prompt_logprobs is not None:
            self._scored(job)
            return
        choice = job.choices[tokens.key.choice]
        if choice.log.ended:
            # Of a step that ran when a stop string was found.
            return
        try:
            stopped = choice.take(tokens)
        except Exception:
            self._end(job, _fault())
            return
        if stopped:
            self._free(key, tokens.key.choice)
        if choice.log.ended and all(one.log.ended for one in job.choices):
            self._end(job)

    def _scored(self, job: Job) -> None:
        """The attempt that scores the prompt has ended. Its token means nothing."""
        del self._jobs[job.attempts.popleft().key]
        if not job.attempts:
            self._end(job)
            return
        self._jobs[job.attempts[0].key] = job
        self._enter([job])

    def _free(self, key: AttemptKey, *choices: int) -> None:
        with suppress(Unavailable):
            self._engine.post(lambda loop: loop.scheduler.cancel(key, choices))

    def _end(self, job: Job, error: BatonError | None = None) -> None:
        """No effect when it has ended."""
        if job.attempts:
            if not self._runs(job):
                return
            key = job.attempts[0].key
            del self._jobs[key]
            if error is not None:
                self._free(key)
        if job.timer is not None:
            job.timer.cancel()
        job.batch.ended.put((job, error))

    def _cancel(self, batch: Batch) -> None:
        for job in [job for job in self._jobs.values() if job.batch is batch]:
            self._end(job, Cancelled("The call was ended."))


async def _unless(stopped: asyncio.Future[Any], starting: Coroutine[Any, Any, T]) -> T:
    """Awaits a start and returns its result. Raises Unavailable when it is interrupted."""
    task = asyncio.create_task(starting)
    await asyncio.wait({stopped, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        raise _closed()
    return task.result()


def _fault() -> Internal:
    """The error for a fault of ours that is being handled, and its line in the log."""
    log.exception("a request failed by a fault of Baton")
    return Internal("This request failed by a fault of Baton; the log has the reason.")


def _closed() -> Unavailable:
    return Unavailable("This LLM is closed.")


def _about_tools(error: BatonError) -> BatonError:
    text = f"tools have parameters that cannot be followed: {error.message}"
    return InvalidArgument(text, field="tools")
