"""Tokenizer work for this router's requests: its queue, its retries, its results."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

from batonlm.core.admission.fair_queue import Entry, FairQueue
from batonlm.core.admission.tenants import Tenant
from batonlm.core.errors import BatonError, DeadlineExceeded
from batonlm.core.observe.stages import UNTRACED, TraceContext
from batonlm.core.request.model import AnswerFormat, ModelDescription, WorkerIdentity
from batonlm.core.request.request import ChatPrompt, Grammar, Prompt, TextPrompt, TokenPrompt
from batonlm.core.request.request_state import VERDICTS, FailureAction
from batonlm.core.routing.failures import RetryBudget
from batonlm.core.routing.routing import tie_break
from batonlm.router.config import RouterConfig
from batonlm.router.workers.clients import TOKEN_ID_BYTES, TokenizerClient
from batonlm.router.workers.fleet import Fleet, Placed, Pool, Worker
from batonlm.router.workers.shared_stream import Broadcast
from batonlm.rpc.convert import (
    chat_to_proto,
    grammar_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from batonlm.rpc.logs import named
from batonlm.v1.tokenizer_pb2 import DecodeInput, EncodeInput

log = logging.getLogger(__name__)

LONG_BYTES = 1 << 16
"""Inputs from this many bytes on are long, as for the tokenizer itself."""

SHORT_BYTES_PER_THREAD = 1 << 15
"""Bytes of short inputs that a tokenizer gets at a time, per thread: one batch in progress and the
next one."""

SHORT_INPUTS_PER_THREAD = 128
"""The same, as a number of inputs, for the smallest ones."""

MAX_GRAMMARS = 2
"""Grammars that one tokenizer gets at a time: as many as it compiles at a time by default."""

THREADS = 2
"""Assumed threads of a tokenizer that does not report them: the fewest that one has."""

INPUT_BYTES = 256
"""The cost of each input, in addition to its own bytes."""

GRAMMAR_BYTES = 1 << 16
"""The cost of a grammar, in addition to these."""

QUANTUM_BYTES = 4096.0
LOOK_AGAIN_S = 0.5
"""Seconds between two looks at deadlines, which pass without any event. A change among tokenizers
is noticed at once."""


class Lane(Enum):
    """Lanes of the queue, which do not wait for each other."""

    SHORT = "short"
    LONG = "long"
    GRAMMAR = "grammar"


@dataclass(slots=True, eq=False)
class QueuedInput:
    """An input that waits for a tokenizer."""

    request_id: str
    tenant: Tenant
    lane: Lane
    size: int
    """In bytes."""
    tokenizer_digest: str
    """"" fits every tokenizer."""
    passed_over: Collection[str]
    """Instance ids that are used only when there is no other."""
    give_up: float
    """Until when a tokenizer may be missing, on the loop's clock."""
    future: asyncio.Future[TokenizerSlot] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True)
class _Sent:
    """What one tokenizer has of this router's inputs."""

    inputs: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    short_bytes: int = 0

    def has_room(self, lane: Lane, size: int, threads: int) -> bool:
        inputs = self.inputs[lane]
        match lane:
            case Lane.SHORT:
                fits = self.short_bytes + size <= SHORT_BYTES_PER_THREAD * threads
                return not inputs or (fits and inputs < SHORT_INPUTS_PER_THREAD * threads)
            case Lane.LONG:
                # The tokenizer keeps a thread for short inputs.
                return inputs < max(1, threads - 1)
            case Lane.GRAMMAR:
                return inputs < MAX_GRAMMARS


class TokenizerSlot:
    """A tokenizer, with room reserved there until `release`, which is idempotent."""

    def __init__(
        self, turns: TokenizerQueue, worker: Worker[TokenizerClient], lane: Lane, size: int
    ) -> None:
        self.worker = worker
        self._turns = turns
        self._lane = lane
        self._size = size
        self._placed: Placed | None = worker.place(1)
        turns._sent_one(worker, lane, size, 1)

    def release(self) -> None:
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.release()
            self._turns._sent_one(self.worker, self._lane, self._size, -1)
            self._turns._dispatch()

    def __enter__(self) -> TokenizerSlot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TokenizerQueue:
    """The queue of inputs for tokenizers, in fair order. One per router.

    A tokenizer processes inputs in order of arrival, so the order is determined here: a router
    sends each one only as much as keeps its threads busy, and the rest waits, by deficit round
    robin over tenants and bytes (`FairQueue`). As at the tokenizer there are three lanes, so that
    none waits for another: short inputs, long ones, and those with a grammar, which is compiled
    first and may take far longer than the text.
    """

    def __init__(self, pool: Pool[TokenizerClient], changed: Broadcast) -> None:
        """changed: set when there may be other tokenizers, or other states of them."""
        self._pool = pool
        self._changed = changed
        # Admission bounds these queues: waiting inputs hold their bytes there.
        self._queues: dict[Lane, FairQueue[QueuedInput]] = {
            lane: FairQueue(max_tokens=sys.maxsize, max_entries=sys.maxsize, quantum=QUANTUM_BYTES)
            for lane in Lane
        }
        self._sent: dict[str, _Sent] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_sent(self) -> int:
        """Inputs of this router that tokenizers have."""
        return sum(sum(sent.inputs.values()) for sent in self._sent.values())

    async def turn(self, wanted: QueuedInput, deadline: float) -> TokenizerSlot:
        """Returns a tokenizer with room, which the caller releases. deadline: on the running loop's
        clock; within a tenant the earliest goes first. Raises Unavailable when there is no
        tokenizer for too long, TimeoutError at the deadline."""
        entry = Entry(
            wanted,
            wanted.tenant.sharer,
            wanted.tenant.weight,
            0,
            wanted.size + INPUT_BYTES + GRAMMAR_BYTES * (wanted.lane is Lane.GRAMMAR),
            asyncio.get_running_loop().time(),
            deadline,
        )
        queue = self._queues[wanted.lane]
        queue.add(entry)
        self._dispatch()
        if not wanted.future.done() and self._looking is None:
            self._looking = asyncio.create_task(self._keep_looking())
        try:
            async with asyncio.timeout_at(deadline):
                return await wanted.future
        except BaseException:
            # Inputs that were served or failed have left the queue.
            if not wanted.future.done() or wanted.future.cancelled():
                queue.remove(entry, served=False)
                self._dispatch()
            elif wanted.future.exception() is None:
                wanted.future.result().release()
            raise

    async def close(self) -> None:
        """Stops the queue. Waiting inputs are ended by their own requests."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _keep_looking(self) -> None:
        try:
            while self.num_waiting:
                await self._changed.wait(LOOK_AGAIN_S)
                self._dispatch()
        finally:
            self._looking = None

    def _dispatch(self) -> None:
        """Assigns tokenizers in order, as far as there is room."""
        if not self.num_waiting:
            return
        now = asyncio.get_running_loop().time()
        usable = self._pool.usable(now)
        for queue in self._queues.values():
            while self._serve_one(queue, usable):
                pass
            self._give_up(queue, usable, now)

    def _serve_one(
        self, queue: FairQueue[QueuedInput], usable: list[Worker[TokenizerClient]]
    ) -> bool:
        """Serves one input; returns whether one left the queue."""
        full: set[str] = set()
        for entry in queue.heads():
            wanted = entry.item
            if wanted.future.done() or wanted.tokenizer_digest in full:
                # A cancelled input removes itself and triggers the next turn. An input never
                # overtakes an earlier one that needs the same tokenizers.
                continue
            fitting = [w for w in usable if w.has_tokenizer(wanted.tokenizer_digest)]
            worker = self._pick(fitting, wanted)
            if worker is None:
                full.add(wanted.tokenizer_digest)
                continue
            queue.remove(entry, served=True)
            wanted.future.set_result(TokenizerSlot(self, worker, wanted.lane, wanted.size))
            return True
        return False

    def _give_up(
        self, queue: FairQueue[QueuedInput], usable: list[Worker[TokenizerClient]], now: float
    ) -> None:
        """Fails inputs whose tokenizers have been missing for too long."""
        digests = {entry.item.tokenizer_digest for entry in queue.heads()}
        absent = {one for one in digests if not any(worker.has_tokenizer(one) for worker in usable)}
        for entry in list(queue) if absent else ():
            wanted = entry.item
            late = now >= wanted.give_up or not self._pool.awaited
            if late and not wanted.future.done() and wanted.tokenizer_digest in absent:
                queue.remove(entry, served=False)
                wanted.future.set_exception(self._pool.absent())

    def _pick(
        self, fitting: list[Worker[TokenizerClient]], wanted: QueuedInput
    ) -> Worker[TokenizerClient] | None:
        """Returns the tokenizer with room and the fewest running calls of this router. One that is
        passed over is used only when there is no other, busy or not."""
        fresh = [w for w in fitting if w.identity.instance_id not in wanted.passed_over]
        return min(
            (worker for worker in fresh or fitting if self._has_room(worker, wanted)),
            key=lambda worker: (
                worker.placed_sequences,
                tie_break(wanted.request_id, worker.identity),
            ),
            default=None,
        )

    def _has_room(self, worker: Worker[TokenizerClient], wanted: QueuedInput) -> bool:
        sent = self._sent.get(worker.identity.instance_id)
        threads = worker.description.max_sequences or THREADS
        return sent is None or sent.has_room(wanted.lane, wanted.size, threads)

    def _sent_one(self, worker: Worker[TokenizerClient], lane: Lane, size: int, one: int) -> None:
        sent = self._sent.setdefault(worker.identity.instance_id, _Sent())
        sent.inputs[lane] += one
        if lane is Lane.SHORT:
            sent.short_bytes += one * size
        if not any(sent.inputs.values()):
            del self._sent[worker.identity.instance_id]


PAUSE_S = 0.1
MAX_KNOWN_GRAMMARS = 4096

AT_ONCE_BYTES = 1 << 16
"""Bytes of packed ids that are unpacked without yielding: about half a millisecond."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedBy:
    """The request for which work is done."""

    request_id: str
    tenant: Tenant
    deadline: float
    """On the running loop's clock."""
    trace: TraceContext = UNTRACED
    """The trace context of the work."""


class EncodedPrompt(NamedTuple):
    """A prompt as a tokenizer returns it."""

    token_ids: tuple[int, ...]
    prefix_hashes: bytes
    """Hashes of its units, as `core.kvcache.prefix` computes them."""
    reasoning_open: bool = False
    """Whether it is a chat's and ends within reasoning."""
    answer_format: AnswerFormat = AnswerFormat()
    """The answer format of the model."""
    too_many: int = 0
    """The number of tokens, when there are too many to unpack; otherwise 0."""


class Tokenizers:
    """Runs tokenizer work for this router's requests, each in its tenant's turn, and retries it on
    another tokenizer when one fails.

    All methods raise BatonError, naming the field when the input is invalid; that is not retried.
    on_turn: called each time that the work is sent to a tokenizer.
    """

    def __init__(self, fleet: Fleet, config: RouterConfig, budget: RetryBudget) -> None:
        self.turns = TokenizerQueue(fleet.tokenizers, fleet.changed)
        self._config = config
        self._budget = budget
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()
        """Digests of grammars that a tokenizer has compiled: it caches the result."""

    async def encode(
        self,
        prompt: Prompt,
        cache_salt: bytes,
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        size: int,
        grammar: Grammar | None = None,
        most_tokens: int | None = None,
        on_turn: Callable[[], None] = lambda: None,
        on_served: Callable[[WorkerIdentity], None] = lambda _: None,
    ) -> EncodedPrompt:
        """Encodes a prompt. size: in bytes. grammar: compiled first. most_tokens: if there are
        more, only their number is returned, because unpacking a million would block the event loop.
        on_served: called with the tokenizer that did it."""
        item = _encode_input(prompt, cache_salt, grammar)
        digest = grammar.digest if grammar is not None else b""
        if grammar is not None and digest not in self._known_grammars:
            lane = Lane.GRAMMAR
        elif size >= LONG_BYTES or (isinstance(prompt, ChatPrompt) and prompt.template):
            # An untrusted template may take long over any input.
            lane = Lane.LONG
        else:
            lane = Lane.SHORT
        output, worker = await self._ask(
            model, asked_by, lane, size, lambda client: partial(client.encode, item), on_turn
        )
        on_served(worker.identity)
        if grammar is not None:
            self._known_grammars[digest] = None
            self._known_grammars.move_to_end(digest)
            if len(self._known_grammars) > MAX_KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)
        num_tokens = len(output.token_ids) // TOKEN_ID_BYTES
        if most_tokens is not None and num_tokens > most_tokens:
            return EncodedPrompt((), b"", too_many=num_tokens)
        return EncodedPrompt(
            await _unpack(output.token_ids),
            output.prefix_hashes,
            output.reasoning_open,
            worker.model.answer_format,
        )

    async def names(
        self, token_ids: tuple[int, ...], model: ModelDescription, asked_by: AskedBy
    ) -> tuple[str, ...]:
        """Returns the names of these tokens in the vocabulary."""
        item = _encode_input(TokenPrompt(token_ids), b"")
        item.with_token_strings = True
        output, _ = await self._ask(
            model,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client: partial(client.encode, item),
        )
        return tuple(output.token_strings)

    async def decode(
        self,
        token_ids: tuple[int, ...],
        model: ModelDescription,
        asked_by: AskedBy,
        *,
        skip_special_tokens: bool,
        on_turn: Callable[[], None] = lambda: None,
    ) -> str:
        """Returns the whole text of these ids."""
        item = DecodeInput(
            token_ids=token_ids_to_bytes(token_ids), skip_special_tokens=skip_special_tokens
        )
        text, _ = await self._ask(
            model,
            asked_by,
            *_lane_of_ids(token_ids),
            lambda client: partial(client.decode, item),
            on_turn,
        )
        return text

    async def close(self) -> None:
        """Stops the queue. Waiting inputs are ended by their own requests."""
        await self.turns.close()

    async def _ask(
        self,
        model: ModelDescription,
        asked_by: AskedBy,
        lane: Lane,
        size: int,
        work: Callable[[TokenizerClient], Callable[[str, float, TraceContext], Awaitable[T]]],
        on_turn: Callable[[], None] = lambda: None,
    ) -> tuple[T, Worker[TokenizerClient]]:
        """Returns the result of `work` on a tokenizer of the model, and that tokenizer. work: takes
        a client and returns a function of the request's id, the seconds left, and its trace."""
        loop = asyncio.get_running_loop()
        passed_over: set[str] = set()
        failures = 0
        while True:
            wanted = QueuedInput(
                asked_by.request_id,
                asked_by.tenant,
                lane,
                size,
                model.tokenizer_digest,
                passed_over,
                give_up=loop.time() + self._config.wait_timeout_s,
            )
            try:
                slot = await self.turns.turn(wanted, asked_by.deadline)
            except TimeoutError:
                raise DeadlineExceeded("The request ran out of time.") from None
            worker = slot.worker
            try:
                with slot:
                    on_turn()
                    left_s = asked_by.deadline - loop.time()
                    done = await work(worker.client)(asked_by.request_id, left_s, asked_by.trace)
                worker.success()
                return done, worker
            except BatonError as error:
                worker.failure(error)
                verdict = VERDICTS[error.reason]
                failures += verdict is FailureAction.ELSEWHERE
                if verdict is FailureAction.FATAL or failures >= self._config.max_attempts:
                    raise
                if verdict is FailureAction.ELSEWHERE and not self._budget.take(loop.time()):
                    raise
                lost = {"lost_at": "tokenizer", "reason": error.reason.name}
                about = {**named(asked_by.request_id, asked_by.trace.trace_id), **lost}
                log.info("a tokenizer failed: %s", error.message, extra=about)
                passed_over.add(worker.identity.instance_id)
                if verdict is FailureAction.LATER:
                    await asyncio.sleep(error.retry_after_s or PAUSE_S)


def _lane_of_ids(token_ids: tuple[int, ...]) -> tuple[Lane, int]:
    size = TOKEN_ID_BYTES * len(token_ids)
    return (Lane.LONG if size >= LONG_BYTES else Lane.SHORT), size


def _encode_input(prompt: Prompt, cache_salt: bytes, grammar: Grammar | None = None) -> EncodeInput:
    item = EncodeInput(cache_salt=cache_salt)
    match prompt:
        case TextPrompt(text, add_special_tokens):
            item.text, item.add_special_tokens = text, add_special_tokens
        case TokenPrompt(token_ids):
            item.token_ids = token_ids_to_bytes(token_ids)
        case ChatPrompt():
            item.chat.CopyFrom(chat_to_proto(prompt))
    if grammar is not None:
        item.grammar.CopyFrom(grammar_to_proto(grammar))
    return item


async def _unpack(packed: bytes) -> tuple[int, ...]:
    """Unpacks token ids in parts, so that other tasks on this loop do not wait for all of them."""
    if len(packed) <= AT_ONCE_BYTES:
        return token_ids_from_bytes(packed, "token_ids")
    found: list[int] = []
    for start in range(0, len(packed), AT_ONCE_BYTES):
        found += token_ids_from_bytes(packed[start : start + AT_ONCE_BYTES], "token_ids")
        await asyncio.sleep(0)
    return tuple(found)
