"""EngineThread, the one thread that owns scheduler, pool and runner, and a thread for KV copies.

asyncio reaches it through two queues. Inwards: functions that run between submitting or collecting
one step and the next, in order, with the EngineLoop as their argument. Outwards: two deliveries a
step (answers with the events of planning, then the events of the step), each one call into the
event loop whatever it carries. The thread sleeps when there is nothing to do, and polls nothing.

It submits steps as long as the runner has room for one and there is one to plan; else it collects
the oldest in flight.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from batonlm.core.errors import Overloaded, Unavailable
from batonlm.core.request.attempt import Attempt
from batonlm.core.routing.load import WorkerSpeed
from batonlm.core.scheduler.events import Event
from batonlm.core.scheduler.loop import EngineLoop
from batonlm.core.scheduler.plan import ModelRunner, StepPlan
from batonlm.core.scheduler.scheduler import Scheduler
from batonlm.core.scheduler.sequence_table import Load
from batonlm.core.scheduler.step_cost import StepTimes

T = TypeVar("T")


async def to_end(running: asyncio.Future[T]) -> T:
    """Awaits work on another thread; a cancellation of ours is raised when it is done.

    For work that uses memory of the waiter's.
    """
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        running.exception()
        raise


class CopyThread:
    """A thread that copies KV between a pool's memory and KV chunks, one copy at a time, in the
    order of calls. It is started with the first one.

    A copy may run beside steps: a hand-over's positions are not written any more once they are
    computed, and not read before they are complete. On a GPU it has a CUDA stream of its own, and
    the thread sleeps until the copy is done. What was pinned or reserved for the copy must not be
    given back before `run` has returned.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kv-copy")

    async def run(self, copy: Callable[[], object]) -> None:
        """Raises what the copy raises, and Unavailable when closed. Cancelled, it returns only when
        the copy has ended."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, copy)
        except RuntimeError:
            raise Unavailable("This worker's engine has stopped.") from None
        await to_end(running)

    def close(self) -> None:
        """Waits for the copy that runs. Idempotent."""
        self._thread.shutdown()


class StepWatch:
    """How long the running step has been running. Times are readings of one clock, in seconds.

    Steps in flight run one after the other, so the oldest began when it was submitted or when the
    one before it ended, whichever came later. The engine thread writes; any thread may read.
    """

    def __init__(self) -> None:
        self._times = StepTimes()
        self._waiting: deque[int] = deque()
        self._began: float | None = None
        self.predicted_s = 0.0
        """A pessimistic guess for the running step, or the last one's when none runs."""

    def planning(self, now: float) -> None:
        """The next step is about to be planned, which may take the device, to draft."""
        if not self._waiting:
            self.predicted_s = self.predicted_s or self._times.predict(1)
            self._began = now

    def planned_none(self) -> None:
        """There is no next step now."""
        if not self._waiting:
            self._began = None

    def submitted(self, num_tokens: int, now: float) -> None:
        """A step of so many tokens is about to be submitted."""
        self._waiting.append(num_tokens)
        if len(self._waiting) == 1:
            self._begin(now)

    def collected(self, now: float) -> float:
        """The oldest step has ended. Returns the seconds that it ran."""
        num_tokens, began = self._waiting.popleft(), self._began
        seconds = 0.0 if began is None else now - began
        self._times.observe(num_tokens, seconds)
        self._began = None
        if self._waiting:
            self._begin(now)
        return seconds

    def stop(self) -> None:
        """Nothing runs any more, whatever was submitted."""
        self._waiting.clear()
        self._began = None

    def age_s(self, now: float) -> float:
        """How long the running step has been running; 0 when there is none."""
        began = self._began
        return 0.0 if began is None else now - began

    def _begin(self, now: float) -> None:
        self.predicted_s = self._times.predict(self._waiting[0])
        self._began = now


logger = logging.getLogger(__name__)


MAX_QUEUED_CALLS = 65536
STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Call:
    """A function for the engine thread, and what came of it."""

    function: Callable[[EngineLoop], Any]
    answer: asyncio.Future[Any] | None
    """None where nothing waits for it."""
    value: Any = None
    error: BaseException | None = None


class EngineThread:
    """make_loop runs on the thread itself, so that whatever is bound to a thread is bound to it.

    deliver gets the events of a step, on the event loop that `start` was awaited on. `failed` is
    done, with the exception, when the thread died of one: the process has to exit then, because
    memory is in an unknown state. on_step gets each step and its time in seconds, on the engine
    thread.
    """

    def __init__(
        self,
        make_loop: Callable[[], EngineLoop],
        deliver: Callable[[list[Event]], None],
        *,
        max_queued_calls: int = MAX_QUEUED_CALLS,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        on_step: Callable[[StepPlan, float], object] = lambda plan, seconds: None,
    ):
        self._make_loop = make_loop
        self._deliver = deliver
        self._on_step = on_step
        self._max_queued_calls = max_queued_calls
        self._stop_timeout_s = stop_timeout_s
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._wake = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._stopping = False
        self._copies = CopyThread()
        self._runner: ModelRunner | None = None
        self._scheduler: Scheduler | None = None
        self._answers: list[_Call] = []
        self._watch = StepWatch()
        self.load = Load(0, 0, 0, 0)
        """How busy the scheduler is, read on its own thread after every step and every call."""

    async def start(self) -> None:
        """Starts the thread and returns when its loop is made. Raises what make_loop raised."""
        self._asyncio = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self._asyncio.create_future()
        self._made: asyncio.Future[None] = self._asyncio.create_future()
        self._thread.start()
        await self._made

    async def stop(self) -> None:
        """Ends the thread after the steps in flight, and closes the runner. Idempotent.

        What they made is still delivered; what is still queued is answered with Unavailable. A step
        that does not return within stop_timeout_s is left alone: the thread is a daemon, so the
        process can still exit.
        """
        if not self._thread.ident:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        try:
            await asyncio.to_thread(self._copies.close)
            await asyncio.to_thread(self._thread.join, self._stop_timeout_s)
        except RuntimeError:
            # The interpreter exits, and no other thread can wait any more.
            self._copies.close()
            self._thread.join(self._stop_timeout_s)
        if self._thread.is_alive():
            logger.error("the engine's step did not end within %g s", self._stop_timeout_s)

    async def call(self, function: Callable[[EngineLoop], T]) -> T:
        """Runs a function on the engine thread and returns, or raises, what it does.

        It runs even if whoever waits is cancelled. Raises Overloaded when too much is queued,
        Unavailable when stopping.
        """
        return await self._enqueue_for_answer(function)

    async def call_to_end(self, function: Callable[[EngineLoop], T]) -> T:
        """Like `call`, but a cancelled waiter leaves only when the function is done.

        For functions that use memory of the waiter's.
        """
        return await to_end(self._enqueue_for_answer(function))

    async def copy(self, function: Callable[[ModelRunner], object]) -> None:
        """Runs a pack or an unpack, beside the running step where the runner allows it.

        A cancelled waiter leaves only when the function is done. Its blocks must stay until then.
        Raises Overloaded and Unavailable like `call`, and what the function raises.
        """
        runner = self._runner
        assert runner is not None, "the thread was not started"
        if runner.copies_beside_steps:
            await self._copies.run(lambda: function(runner))
        else:
            await self.call_to_end(lambda loop: function(loop.runner))

    def post(self, function: Callable[[EngineLoop], object]) -> None:
        """Runs a function on the engine thread, without an answer. It must not raise.

        It is for ending or giving back what a function of `call` began or took. So there are no
        more of these than there were of those, and none is refused because too much is queued:
        blocks would stay pinned. Raises Unavailable when stopping.

        Functions of `call` and `post` run in the order in which they were given.
        """
        self._enqueue(_Call(function, None))

    def check_limit(self, attempt: Attempt) -> None:
        """Raises Overloaded when the scheduler would refuse an attempt, by the load that it had
        after the last step or call. Waits for neither."""
        assert self._scheduler is not None, "the thread was not started"
        self._scheduler.limit.check(self.load, attempt)

    @property
    def speed(self) -> WorkerSpeed:
        """By the steps so far."""
        assert self._scheduler is not None, "the thread was not started"
        return self._scheduler.speed

    @property
    def step_age_s(self) -> float:
        """How long the running step has been running, in seconds; 0 when there is none."""
        return self._watch.age_s(time.monotonic())

    @property
    def step_predicted_s(self) -> float:
        """A pessimistic guess of how long the running step takes, or the last one if none runs."""
        return self._watch.predicted_s

    def _enqueue_for_answer(self, function: Callable[[EngineLoop], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self._asyncio.create_future()
        self._enqueue(_Call(function, answer))
        return answer

    def _enqueue(self, call: _Call) -> None:
        with self._wake:
            if self._stopping:
                raise Unavailable("This worker's engine has stopped.")
            if call.answer is not None and len(self._calls) >= self._max_queued_calls:
                raise Overloaded("Too much is queued for this worker's engine.", retry_after_s=1.0)
            self._calls.append(call)
            self._wake.notify()

    def _main(self) -> None:
        """The thread's life."""
        try:
            loop = self._make_loop()
        except BaseException as error:
            self._end()
            self._call_back(_fail, self._made, error)
            return
        self.load = loop.scheduler.load
        self._runner, self._scheduler = loop.runner, loop.scheduler
        self._call_back(_resolve, self._made, None)
        try:
            self._run(loop)
        except BaseException as error:
            logger.exception("the engine thread died")
            self._call_back(_resolve, self.failed, error)
        finally:
            self._watch.stop()
            self._end()
            loop.runner.close()

    def _run(self, loop: EngineLoop) -> None:
        wake: float | None = None
        idle = unchecked = False
        while (calls := self._next_calls(idle, wake)) is not None:
            for call in calls:
                self._answer(call, loop)
            now = time.monotonic()
            if loop.scheduler.has_work:
                self._watch.planning(now)
            plan = loop.plan(now)
            self.load = loop.scheduler.load
            self._flush(loop.scheduler.take_events())
            if plan is not None:
                unchecked = True
                self._watch.submitted(plan.num_tokens, now + plan.work.drafting_s)
                loop.submit(plan)
            else:
                self._watch.planned_none()
            if loop.in_flight and (plan is None or not loop.has_room):
                self._collect(loop)
            idle = plan is None and not loop.in_flight
            if idle:
                wake = loop.scheduler.next_wake(now)
                if unchecked and not loop.scheduler.has_work:
                    unchecked = False
                    loop.idle_check()
        while loop.in_flight:
            self._collect(loop)

    def _collect(self, loop: EngineLoop) -> None:
        plan, result = loop.collect()
        ended = time.monotonic()
        seconds = self._watch.collected(ended)
        self._on_step(plan, seconds)
        loop.scheduler.observe(plan, seconds)
        events = loop.apply(result, ended)
        self.load = loop.scheduler.load
        self._flush(events)

    def _next_calls(self, idle: bool, wake: float | None) -> list[_Call] | None:
        """What is queued, after sleeping for it if idle; None when the thread has to end."""
        with self._wake:
            if idle:
                timeout = None if wake is None else max(0.0, wake - time.monotonic())
                self._wake.wait_for(lambda: self._calls or self._stopping, timeout)
            if self._stopping:
                return None
            calls = list(self._calls)
            self._calls.clear()
            return calls

    def _answer(self, call: _Call, loop: EngineLoop) -> None:
        try:
            call.value = call.function(loop)
        except Exception as error:
            call.error = error
            if call.answer is None:
                logger.exception("a function posted to the engine thread failed")
        if call.answer is not None:
            self._answers.append(call)

    def _flush(self, events: list[Event]) -> None:
        """Hands answers and events over in one go."""
        answers, self._answers = self._answers, []
        if answers or events:
            self._call_back(self._hand_over, answers, events)

    def _hand_over(self, answers: list[_Call], events: list[Event]) -> None:
        """On the event loop. Answers go first: events may be about what they began."""
        for call in answers:
            assert call.answer is not None
            if call.error is None:
                _resolve(call.answer, call.value)
            else:
                _fail(call.answer, call.error)
        if events:
            self._deliver(events)

    def _end(self) -> None:
        """Takes no more calls and refuses those that are queued."""
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.error = Unavailable("This worker's engine has stopped.")
        self._answers += [call for call in calls if call.answer is not None]
        self._flush([])

    def _call_back(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            self._asyncio.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop is closed: the process ends.
            logger.debug("the event loop closed before the engine thread ended")


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    """Without effect when whoever waits has left: then the future is cancelled."""
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """As `_resolve`."""
    if not future.done():
        future.set_exception(error)
