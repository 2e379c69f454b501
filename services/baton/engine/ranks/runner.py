"""RankedRunner, the ModelRunner port over several ranks; imports neither torch nor Ray.

All ranks get every plan and compute their heads of it; all of them draw the same tokens, and
rank 0's are reported. KV moves through memory that all ranks map: each packs its heads into the
payload where it lies, and no rank sees another's.

Messages between the runner and its ranks are plain values, encoded with msgspec; field types are
checked on arrival. There is no pickle, whatever carries the bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import msgspec

from baton.core.errors import Internal, InvalidArgument
from baton.core.kvcache.block_pool import Extents
from baton.core.request.model import KvLayout, ModelDescription
from baton.core.scheduler.plan import KvPayload, StagingMemory, StepPlan, StepResult, in_host
from baton.engine.config import EngineConfig
from baton.engine.kv.extents import check_extents, check_plan
from baton.engine.ranks.shared import MemoryFile, Region, Scratch, SharedPlace


class Open(msgspec.Struct, frozen=True, tag=True):
    """Load your part. Sizes of memory in `config` are already a rank's share."""

    config: EngineConfig


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Transfer(msgspec.Struct, frozen=True, tag=True):
    """Write your heads' KV of the positions into the payload at `place`; or, unless packing, read
    it from there."""

    extents: Extents
    first_position: int
    count: int
    place: SharedPlace
    packing: bool


class Opened(msgspec.Struct, frozen=True, tag=True):
    model: ModelDescription
    layout: KvLayout
    """Of the rank's own heads."""
    num_blocks: int
    not_exact_because: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Transferred(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    field: str = ""
    """What the operator has to change; "" for a fault of ours."""


Request = Open | Step | Transfer
Answer = Opened | Stepped | Transferred | Refused

# A plan's sequences of tokens may be of any kind that can be read like a tuple.
encode = msgspec.msgpack.Encoder(enc_hook=list).encode
to_request = msgspec.msgpack.Decoder[Request](Request).decode
to_answer = msgspec.msgpack.Decoder[Answer](Answer).decode


class Ranks(Protocol):
    """Ranks 0 to size - 1, each a `rank.Rank` that answers requests in order.

    Called by the engine thread only. Real: `ray_ranks.RayRanks`; double: `LocalRanks` of the tests.
    """

    @property
    def size(self) -> int: ...

    def ask(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Tells all ranks the same and yields (rank, answer) as they come.

        Raises Internal when a rank has died, or takes longer than any step can. Who stops asking
        half way has to close: the ranks are out of step.
        """

    def on_death(self, died: Callable[[], None]) -> None:
        """Has `died` called, on a thread of its own, when a rank ends before `close`."""

    def close(self) -> None:
        """Ends the ranks and frees what they hold. Idempotent."""


log = logging.getLogger(__name__)

FIELD = "tensor_parallel"
"""What the operator calls the number of ranks."""


class RankedRunner:
    """Made by `open`, which takes the ranks over; `close` ends them. Engine thread only."""

    def __init__(self, ranks: Ranks, opened: Opened, block_size: int):
        self._ranks = ranks
        self.model = opened.model
        self.layout = replace(opened.layout, num_kv_heads=opened.layout.num_kv_heads * ranks.size)
        """Over all heads: payloads do not depend on the number of ranks."""
        self.num_blocks = opened.num_blocks
        self.block_size = block_size
        self.num_swap_blocks = 0, 0
        self.depth = 1
        self.copies_beside_steps = self.on_device = False
        """Ranks do one thing at a time."""
        self.not_exact_because = opened.not_exact_because
        self._results: deque[StepResult] = deque()
        self._shared: Region | None = None
        self._scratch = Scratch()

    @classmethod
    def open(cls, ranks: Ranks, config: EngineConfig) -> RankedRunner:
        """Has every rank load its part. config: the worker's, memory is shared out here; but
        threads are those of one rank.

        Raises InvalidArgument, naming the field, for what ranks cannot serve. Closes the ranks when
        it raises.
        """
        try:
            if config.quantize != "none":
                raise InvalidArgument("more than one rank takes quantize none", field=FIELD)
            share = replace(
                config,
                kv_memory_bytes=config.kv_memory_bytes // ranks.size,
                swap_host_bytes=0,
                swap_disk_bytes=0,
            )
            opened = [answer for answer in _ask(ranks, Open(share)) if isinstance(answer, Opened)]
            parts = {(each.layout, each.num_blocks, each.model) for each in opened}
            if len(opened) != ranks.size or len(parts) != 1:
                raise Internal("the ranks do not agree on what they loaded")
        except BaseException:
            ranks.close()
            raise
        return cls(ranks, opened[0], config.block_size)

    @property
    def exact(self) -> bool:
        """As TorchRunner's, among runners of as many ranks: another number sums in another
        order."""
        return not self.not_exact_because

    def submit(self, plan: StepPlan) -> None:
        check_plan(plan, self)
        answers = _ask(self._ranks, Step(plan))
        if not isinstance(answers[0], Stepped):
            raise Internal("a rank answered out of place")
        self._results.append(answers[0].result)

    def collect(self) -> StepResult:
        if not self._results:
            raise Internal("no step was submitted")
        return self._results.popleft()

    def staging_memory(self, num_bytes: int) -> StagingMemory | None:
        return None

    def share(self, fd: int, address: int, num_bytes: int) -> Callable[[], None]:
        """The ranks map the memory; payloads that lie elsewhere are copied once more."""
        self._shared = Region(MemoryFile.of(fd), address)
        return lambda: None

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        self._transfer(extents, first_position, count, in_host(out), packing=True)

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        self._transfer(extents, first_position, count, in_host(payload), packing=False)

    def on_death(self, died: Callable[[], None]) -> None:
        """See Ranks.on_death. The process has to end then, whether or not a step is running."""
        self._ranks.on_death(died)

    def close(self) -> None:
        self._results.clear()
        self._ranks.close()
        self._scratch.close()

    def _transfer(
        self, extents: Extents, first: int, count: int, payload: memoryview, *, packing: bool
    ) -> None:
        # Checked before any rank begins: one that refuses has lost its step.
        check_extents(extents, first + count, self.num_blocks, self.block_size)
        if count <= 0 or payload.nbytes != count * self.layout.bytes_per_position:
            raise Internal("the payload's size does not fit its positions")
        room = None
        place = None if self._shared is None else self._shared.find(payload)
        if place is None:
            place, room = self._scratch.room(payload.nbytes)
        if room is not None and not packing:
            room[:] = payload.cast("B")
        answers = _ask(self._ranks, Transfer(extents, first, count, place, packing))
        if not all(isinstance(answer, Transferred) for answer in answers):
            raise Internal("a rank answered out of place")
        if room is not None and packing:
            payload.cast("B")[:] = room


def _ask(ranks: Ranks, request: Request) -> list[Answer]:
    """All answers by rank. The first refusal is raised at once: the others may wait for that rank
    and never answer."""
    answers: dict[int, Answer] = {}
    for rank, data in ranks.ask(encode(request)):
        answer = to_answer(data)
        if isinstance(answer, Refused):
            log.error("rank %d refused: %s", rank, answer.message)
            if answer.field:
                raise InvalidArgument(answer.message, field=answer.field)
            raise Internal(answer.message)
        answers[rank] = answer
    return [answers[rank] for rank in range(ranks.size)]
