"""RankedRunner, the ModelRunner port over several ranks; imports no torch.

Ranks form stages: each stage has some layers of the model (pipeline parallel), and the ranks of one
stage share those layers' heads, experts and vocabulary (tensor parallel). All ranks get every plan.
One of them, the first of the last stage, draws the tokens; where a plan is submitted before its
tokens are known, that rank passes them on to the others on their own way, see `rank.Rank`.

KV moves through memory that all ranks map, of the host or of their GPUs: each packs its heads and
layers into the payload where it lies, and no rank sees another's. Steps and copies have links of
their own, so that a copy runs beside a step.

Messages are plain values, encoded with msgspec; field types are checked on arrival. There is no
pickle.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from batonlm.core.errors import Internal, InvalidArgument, NotFound, Unavailable
from batonlm.core.handover.leaf_hash import WORD_BYTES, Points
from batonlm.core.kvcache.block_pool import Extents
from batonlm.core.request.model import AdapterDescription, KvLayout, ModelDescription
from batonlm.core.request.request import SamplingParams
from batonlm.core.scheduler.plan import (
    KvPayload,
    SampleRow,
    StagingMemory,
    StepPlan,
    StepResult,
    in_host,
)
from batonlm.engine.config import EngineConfig
from batonlm.engine.kv.extents import check_extents, check_plan
from batonlm.engine.ranks.link import Link, LinkLost, receive_each, receive_first, watch
from batonlm.engine.ranks.shared import GpuMemory, MemoryFile, Region, Scratch, SharedPlace
from batonlm.engine.ranks.staging import RanksStaging

log = logging.getLogger(__name__)

FIELD = "tensor_parallel"
"""What the operator calls the number of ranks of a stage."""
STAGES = "pipeline_parallel"
"""What the operator calls the number of stages."""

LOAD_S = 1800.0
"""Longest time without a message of any rank that loads."""
STEP_S = 300.0
"""Longest step or copy of ranks that live: the first one of a GPU compiles kernels. A rank that has
ended or hangs is noticed earlier, see `link.watch`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands. Ranks are numbered stage by stage."""

    rank: int
    tensor: int
    """Ranks of a stage."""
    stages: int

    @property
    def size(self) -> int:
        return self.tensor * self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def part(self) -> int:
        """Which of its stage's parts the rank has."""
        return self.rank % self.tensor

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def samples(self) -> bool:
        """Whether this rank draws the tokens of all."""
        return self.rank == sampler(self.tensor, self.stages)


def sampler(tensor: int, stages: int) -> int:
    """The rank that draws the tokens."""
    return tensor * (stages - 1)


def layers_of(num_layers: int, place: Place) -> tuple[int, int]:
    """The range of a stage's layers; earlier stages have one more where they do not divide."""
    each, more = divmod(num_layers, place.stages)
    first = place.stage * each + min(place.stage, more)
    return first, first + each + (place.stage < more)


class Open(msgspec.Struct, frozen=True, tag=True):
    """Load your part. Sizes of memory in `config` are already a rank's share."""

    config: EngineConfig


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Transfer(msgspec.Struct, frozen=True, tag=True):
    """Write your heads' and layers' KV of the positions into the payload at `place`; or, unless
    packing, read it from there."""

    extents: Extents
    first_position: int
    count: int
    place: SharedPlace
    packing: bool


class OpenMemory(msgspec.Struct, frozen=True, tag=True):
    """Map these memories of GPUs, and no others any more."""

    memories: tuple[GpuMemory, ...]


class HashLeaves(msgspec.Struct, frozen=True, tag=True):
    """Compute `core.handover.leaf_hash` of what lies at `place`, which is on your GPU."""

    place: SharedPlace
    points: Points


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far a rank has come with its weights."""

    done_bytes: int
    total_bytes: int


class Opened(msgspec.Struct, frozen=True, tag=True):
    model: ModelDescription
    layout: KvLayout
    """Of payloads: over all heads and layers."""
    num_blocks: int
    num_swap_blocks: tuple[int, int]
    not_exact_because: str
    on_device: bool


class Stepped(msgspec.Struct, frozen=True, tag=True):
    result: StepResult
    """Has tokens of the sampling rank only."""


class Transferred(msgspec.Struct, frozen=True, tag=True):
    pass


class MemoryOpened(msgspec.Struct, frozen=True, tag=True):
    refusal: str
    """Why not; "" where it is."""


class LeavesHashed(msgspec.Struct, frozen=True, tag=True):
    hashes: bytes


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    message: str
    field: str = ""
    """Of the configuration, or "" for a fault that is not the operator's."""


Request = Open | Step | Transfer | OpenMemory | HashLeaves
Answer = Loading | Opened | Stepped | Transferred | MemoryOpened | LeavesHashed | RankRefused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def to_request(data: bytes) -> Request:
    """Raises Internal for what is no request."""
    try:
        return _requests.decode(data)
    except msgspec.MsgspecError as error:
        raise Internal("a rank was sent something that is no request") from error


def _to_answer(data: bytes) -> Answer:
    try:
        return _answers.decode(data)
    except msgspec.MsgspecError as error:
        raise Internal("a rank sent something that is no answer") from error


class FarMemory(Protocol):
    """Memory of another machine, which its ranks map: payloads pass through it."""

    @property
    def link(self) -> Link: ...

    @property
    def ranks(self) -> range:
        """Which share it."""

    def hold(self, total_bytes: int, offset: int, data: bytes | memoryview) -> SharedPlace:
        """Makes room for a payload, with `data` in it from `offset` on. Raises LinkLost."""

    def read(self, offset: int, out: memoryview) -> None:
        """Fills `out` with what the payload holds from `offset` on. Raises LinkLost."""


class Ranks(Protocol):
    """The ranks of one worker, each at the other end of its links, in the order of ranks.

    Real: `processes.RankProcesses`, `machines.RankMachines`; double: `LocalRanks` of the tests,
    whose ranks are threads.
    """

    @property
    def tensor(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def steps(self) -> Sequence[Link]:
        """For everything but copies."""

    @property
    def copies(self) -> Sequence[Link]: ...

    @property
    def watched(self) -> Sequence[Link]:
        """For `link.watch` only."""

    @property
    def far(self) -> Sequence[FarMemory]:
        """Of other machines, on which ranks are that do not share this one's memory."""

    def close(self) -> None:
        """Ends the ranks and frees what they hold. Idempotent."""


class RankedRunner:
    """Made by `open`, which takes the ranks over; `close` ends them."""

    depth = 2
    """`submit` only sends the plan: this process prepares the next one while the ranks compute."""
    copies_beside_steps = True

    def __init__(self, ranks: Ranks, opened: Opened, block_size: int, lost: Future[None]):
        """lost: done when a rank has ended or hangs."""
        self._ranks, self._lost = ranks, lost
        self._sampler = sampler(ranks.tensor, ranks.stages)
        self.model = opened.model
        self.layout = opened.layout
        """Payloads do not depend on the number of ranks."""
        self.num_blocks = opened.num_blocks
        self.block_size = block_size
        self.num_swap_blocks = opened.num_swap_blocks
        self.not_exact_because = opened.not_exact_because
        self.on_device = opened.on_device
        self._copying = [threading.Lock() for _ in ranks.copies]
        """Of each rank: who may use its link for copies. Taken in the order of ranks."""
        self._running: deque[int] = deque()
        self._closed = False
        self._shared: Region | None = None
        self._scratch = Scratch()

    @classmethod
    def open(
        cls,
        ranks: Ranks,
        config: EngineConfig,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> RankedRunner:
        """Has every rank load its part. config: the worker's, memory is shared out here; but
        threads are those of one rank. progress: called with bytes that the slowest rank has read,
        and has to read.

        Raises InvalidArgument, naming the field, for what ranks cannot serve. Closes the ranks when
        it raises.
        """
        lost: Future[None] = Future()

        def cut() -> None:
            # Ends whatever waits for ranks: one that hangs answers nothing.
            for link in (*ranks.steps, *ranks.copies, *(memory.link for memory in ranks.far)):
                link.cut()
            lost.set_result(None)

        watch(ranks.watched, cut)
        try:
            opened = _load(ranks, config, progress)
            if len({(each.model, each.layout, each.num_blocks) for each in opened}) != 1:
                raise Internal("the ranks do not agree on what they loaded")
        except BaseException:
            ranks.close()
            raise
        first = opened[0]
        host, disk = (min(each.num_swap_blocks[i] for each in opened) for i in (0, 1))
        reasons = [each.not_exact_because for each in opened if each.not_exact_because]
        agreed = msgspec.structs.replace(
            first, num_swap_blocks=(host, disk), not_exact_because=next(iter(reasons), "")
        )
        return cls(ranks, agreed, config.block_size, lost)

    @property
    def exact(self) -> bool:
        """As TorchRunner's, among runners of as many ranks: another number sums in another
        order."""
        return not self.not_exact_because

    def load_adapter(self, folder: Path) -> AdapterDescription:
        raise InvalidArgument("adapters are served by workers of one rank only", field="adapter")

    def unload_adapter(self, digest: str) -> None:
        raise NotFound("This worker has no adapters.", field="adapter")

    def submit(self, plan: StepPlan) -> None:
        check_plan(plan, self)
        # What tokens are drawn by concerns one rank, and may be long.
        drawn, others = encode(Step(plan)), encode(Step(_without_sampling(plan)))
        self._running.append(plan.step)
        for rank, link in enumerate(self._ranks.steps):
            self._send(link, drawn if rank == self._sampler else others)

    def collect(self) -> StepResult:
        if not self._running:
            raise Internal("no step was submitted")
        step = self._running.popleft()
        results: dict[int, StepResult] = {}
        for rank, answer in _answers_of(self._ranks.steps, STEP_S):
            if not isinstance(answer, Stepped) or answer.result.step != step:
                raise Internal("a rank answered out of place")
            results[rank] = answer.result
        own = results.pop(self._sampler)
        # A disk may have lost blocks of swap memory on any rank.
        known = dict(own.failed)
        lost = {s: why for each in results.values() for s, why in each.failed if s not in known}
        if not lost:
            return replace(own, swap_s=max([own.swap_s, *(r.swap_s for r in results.values())]))
        return replace(
            own,
            tokens=tuple(t for t in own.tokens if t.sequence_id not in lost),
            scored=tuple(s for s in own.scored if s.sequence_id not in lost),
            failed=(*own.failed, *lost.items()),
        )

    def staging_memory(self, num_buffers: int, buffer_bytes: int) -> StagingMemory | None:
        """Whole buffers, shared out among the ranks' GPUs: every rank writes its heads and layers
        into all of them. See `staging.RanksStaging`."""
        # The device's digest is of whole words.
        whole = self.layout.bytes_per_position % WORD_BYTES == 0
        if not self.on_device or not whole or self._ranks.far:
            return None
        return RanksStaging(
            len(self._ranks.copies), num_buffers, buffer_bytes, self._open_memory, self._hash_leaves
        )

    def share(self, fd: int, address: int, num_bytes: int) -> Callable[[], None]:
        """The ranks map the memory; payloads that lie elsewhere are copied once more."""
        self._shared = Region(MemoryFile.of(fd), address)
        return lambda: None

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        self._transfer(extents, first_position, count, out, packing=True)

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        self._transfer(extents, first_position, count, payload, packing=False)

    def on_death(self, died: Callable[[], None]) -> None:
        """Calls `died` once, on whichever thread, when a rank has ended or hangs before `close`.
        The process has to end then, whether or not a step is running."""
        self._lost.add_done_callback(lambda _: None if self._closed else died())

    def close(self) -> None:
        self._closed = True
        self._running.clear()
        self._ranks.close()
        self._scratch.close()

    def _transfer(
        self, extents: Extents, first: int, count: int, payload: KvPayload, *, packing: bool
    ) -> None:
        # Checked before any rank begins: one that refuses has lost its step.
        check_extents(extents, first + count, self.num_blocks, self.block_size)
        if count <= 0 or payload.nbytes != count * self.layout.bytes_per_position:
            raise Internal("the payload's size does not fit its positions")
        if isinstance(payload, SharedPlace):
            place = payload
            self._ask_copies(lambda rank: Transfer(extents, first, count, place, packing))
            return
        host = in_host(payload).cast("B")
        room = None
        found = None if self._shared is None else self._shared.find(host)
        if found is None:
            found, room = self._scratch.room(host.nbytes)
        if room is not None and not packing:
            room[:] = host
        try:
            places = self._places_elsewhere(host, packing)
            self._ask_copies(
                lambda rank: Transfer(extents, first, count, places.get(rank, found), packing)
            )
            if not packing:
                return
            if room is not None:
                host[:] = room
            for memory in self._ranks.far:
                own = self._part_of(memory, host.nbytes)
                memory.read(own.start, host[own])
        except LinkLost:
            raise Internal(_LOST) from None

    def _open_memory(self, memories: tuple[GpuMemory, ...]) -> None:
        """Has all ranks map these. Raises Unavailable when one cannot."""
        for answer in self._ask_copies(lambda rank: OpenMemory(memories)):
            if isinstance(answer, MemoryOpened) and answer.refusal:
                raise Unavailable(answer.refusal)

    def _hash_leaves(self, rank: int, place: SharedPlace, points: Points) -> bytes:
        link = self._ranks.copies[rank]
        try:
            with self._copying[rank]:
                link.send(encode(HashLeaves(place, points)), STEP_S)
                answer = _accepted(rank, link.receive(STEP_S))
        except LinkLost:
            raise Internal(_LOST) from None
        if not isinstance(answer, LeavesHashed):
            raise Internal("a rank answered out of place")
        return answer.hashes

    def _ask_copies(self, request: Callable[[int], Request]) -> list[Answer]:
        """Sends each rank its own and returns all answers, once every rank is through."""
        with ExitStack() as turns:
            for turn in self._copying:
                turns.enter_context(turn)
            try:
                for rank, link in enumerate(self._ranks.copies):
                    link.send(encode(request(rank)), STEP_S)
            except LinkLost:
                raise Internal(_LOST) from None
            answers = [answer for _, answer in _answers_of(self._ranks.copies, STEP_S)]
        if not all(isinstance(answer, Transferred | MemoryOpened) for answer in answers):
            raise Internal("a rank answered out of place")
        return answers

    def _places_elsewhere(self, payload: memoryview, packing: bool) -> dict[int, SharedPlace]:
        """Where ranks of other machines find a copy of the payload, of which their layers alone are
        sent. Raises LinkLost."""
        places: dict[int, SharedPlace] = {}
        for memory in self._ranks.far:
            own = self._part_of(memory, payload.nbytes)
            place = memory.hold(payload.nbytes, own.start, b"" if packing else payload[own])
            places |= dict.fromkeys(memory.ranks, place)
        return places

    def _part_of(self, memory: FarMemory, payload_bytes: int) -> slice:
        """The bytes of a payload that are of the memory's ranks' layers."""
        of_a_layer = payload_bytes // self.layout.num_layers
        first, last = (
            Place(rank, self._ranks.tensor, self._ranks.stages)
            for rank in (memory.ranks[0], memory.ranks[-1])
        )
        layers = (
            layers_of(self.layout.num_layers, first)[0],
            layers_of(self.layout.num_layers, last)[1],
        )
        return slice(layers[0] * of_a_layer, layers[1] * of_a_layer)

    def _send(self, link: Link, message: bytes) -> None:
        try:
            link.send(message, STEP_S)
        except LinkLost:
            raise Internal("a rank has died") from None


_ANY = SamplingParams(temperature=0.0)


def _without_sampling(plan: StepPlan) -> StepPlan:
    """The plan for ranks that draw no tokens: they compute the same rows of logits."""
    chunks = tuple(
        chunk._replace(samples=tuple(SampleRow(row[0], 0, 0, _ANY) for row in chunk.samples))
        for chunk in plan.chunks
    )
    return replace(plan, chunks=chunks)


def _load(ranks: Ranks, config: EngineConfig, progress: Callable[[int, int], None]) -> list[Opened]:
    size = ranks.tensor * ranks.stages
    if config.adapter_memory_bytes:
        raise InvalidArgument("adapters are served by workers of one rank only", field=FIELD)
    share = replace(
        config,
        kv_memory_bytes=config.kv_memory_bytes // size,
        swap_host_bytes=config.swap_host_bytes // size,
        swap_disk_bytes=config.swap_disk_bytes // size,
    )
    request = encode(Open(share))
    try:
        for link in ranks.steps:
            link.send(request, LOAD_S)
    except LinkLost:
        raise Internal("a rank has died") from None
    opened: dict[int, Opened] = {}
    done = dict.fromkeys(range(size), 0)
    # In the order in which they come, however many each rank sends: a rank that has failed or died
    # is noticed while another one says nothing, as one does that waits for it.
    while len(opened) < size:
        waiting = [rank for rank in range(size) if rank not in opened]
        try:
            i, data = receive_first([ranks.steps[rank] for rank in waiting], LOAD_S)
        except LinkLost:
            raise Internal(_LOST) from None
        rank, answer = waiting[i], _accepted(waiting[i], data)
        if isinstance(answer, Loading):
            done[rank] = answer.done_bytes
            progress(min(done.values()), answer.total_bytes)
        elif isinstance(answer, Opened):
            opened[rank] = answer
        else:
            raise Internal("a rank answered out of place")
    return [opened[rank] for rank in range(size)]


_LOST = "a rank has died or does not answer"


def _answers_of(links: Sequence[Link], timeout_s: float) -> list[tuple[int, Answer]]:
    """An answer of each rank. The first refusal is raised at once: the others may wait for that
    rank and never answer. Raises Internal when a rank has died or answers too late."""
    try:
        return [(rank, _accepted(rank, data)) for rank, data in receive_each(links, timeout_s)]
    except LinkLost:
        raise Internal(_LOST) from None


def _accepted(rank: int, data: bytes) -> Answer:
    """A rank's answer. Raises InvalidArgument or Internal for a refusal."""
    answer = _to_answer(data)
    if isinstance(answer, RankRefused):
        log.error("rank %d refused: %s", rank, answer.message)
        if answer.field:
            raise InvalidArgument(answer.message, field=answer.field)
        raise Internal(answer.message)
    return answer
