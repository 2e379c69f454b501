"""One Collect stream from the receiver's end: reserve, credit, read, verify, unpack, confirm.

A credit stands for a landing buffer that is held here. A KV chunk goes: read into its landing
buffer, header and digest verified, unpacked into blocks in the order of KV chunks, buffer released,
confirmed. Nothing is unpacked that did not verify. When the work ends early, a read may still be
running: its buffer is released all the same and stays orphaned until the read has ended; the blocks
behind it are touched only by unpacking, which is always waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from baton.core.errors import Cancelled, DeadlineExceeded, HandoverFailed, Overloaded
from baton.core.handover.messages import (
    Announced,
    Completed,
    Credit,
    Failed,
    Finished,
    Full,
    Granted,
    KvChunkCollected,
    KvChunkHeader,
    KvChunkReady,
    OpenHandover,
    ReceiverMessage,
    SenderMessage,
    Tokens,
)
from baton.core.handover.table import HandoverEvent, ReceiverSide, ReceiverState, Run
from baton.core.request.attempt import ChoiceTokens
from baton.transfer.buffers import StagingBuffer
from baton.transfer.connection import CollectStream
from baton.transfer.ending import StateTimeout, TransferAborted, why
from baton.transfer.kv_chunk import HEADER_BYTES, Sealer, positions_per_kv_chunk
from baton.transfer.line import HeartbeatStream
from baton.transfer.peers import Peer
from baton.transfer.stats import now
from baton.transfer.tasks import outlast, race, to_end
from baton.transfer.ticket import Collected, Reserve, Surroundings, TransferRequest, Unpack
from baton.transfer.transport import TransportError

MAX_IN_FLIGHT = 4
"""KV chunks of one hand-over under way: enough to overlap packing, reading and unpacking."""

READ_S = 5.0
"""A read that takes longer is given up. A frozen sender is found earlier, by its silence."""


class IncomingTransfer:
    """The work on one stream. `run` is called once, and `see_off` once after it."""

    def __init__(
        self,
        around: Surroundings,
        ticket: TransferRequest,
        peer: Peer,
        stream: CollectStream,
        reserve: Reserve,
        unpack: Unpack,
    ) -> None:
        self._around, self._ticket, self._peer, self._stream = around, ticket, peer, stream
        self._reserve_blocks, self._unpack = reserve, unpack
        self._line: HeartbeatStream[SenderMessage, ReceiverMessage] = HeartbeatStream(
            around.faults.hearing("receiver", aiter(stream)),
            around.faults.saying("receiver", stream.send),
            around.liveness,
        )
        buffer_bytes = min(around.ring.buffer_bytes, peer.meeting.ring.buffer_bytes)
        self.side = ReceiverSide(
            ticket.num_positions, positions_per_kv_chunk(buffer_bytes, around.layout)
        )
        self._wire_version = around.layout.common_wire_version(peer.meeting.layout)
        self._sealer = Sealer(
            ticket.handover_id,
            ticket.sender.instance_id,
            around.layout,
            peer.meeting.digest,
            wire_version=self._wire_version,
        )
        self._patience = StateTimeout(around.limits, lambda: self.side.state)
        self._changed = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credited: deque[StagingBuffer] = deque()
        self._landing: dict[int, StagingBuffer] = {}
        self._landings: set[asyncio.Task[None]] = set()
        self._newest: asyncio.Task[None] | None = None
        self._tokens: tuple[ChoiceTokens, ...] = ()
        self._received_bytes = self._cached_positions = 0
        self._opened_at = self._last_told_at = 0.0
        self._received_when_told = 0
        self.ending: TransferAborted | None = None

    async def run(self) -> Collected:
        """Collects. On return or raise every buffer is released and nothing unpacks any more.

        Raises Ending; Overloaded when `reserve` had no room.
        """
        try:
            await race(
                self._take(),
                self._line.listen(self._hear),
                self._line.beat(),
                self._patience.watch(),
                self._fail_with_landings(),
                self._run_out_of_time(),
            )
        except asyncio.CancelledError:
            self.ending = TransferAborted(HandoverEvent.CANCEL, Cancelled("the receiver gave up"))
            raise
        except Exception as error:
            if not self.side.ended:
                self.ending = why(error, self._ticket.about)
                raise self.ending from error
        finally:
            await self._clean_up()
        if self.side.state is ReceiverState.FULL:
            raise Overloaded("this worker has no room for the sequence")
        return Collected(self._tokens, self._received_bytes, self._cached_positions)

    async def see_off(self, timeout_s: float) -> None:
        """Tells the sender how it ended, if it does not know, and ends the stream. Bounded."""
        try:
            async with asyncio.timeout(timeout_s):
                if self.ending is not None and not self.ending.peer_knows:
                    await self._line.say(Failed(self.ending.error))
        except Exception:
            # The stream is broken; the sender finds out by that.
            pass
        finally:
            await self._stream.close()
            await self._line.close(timeout_s)

    async def _clean_up(self) -> None:
        if self.ending is not None:
            self.side.end(self.ending.event)
        landings = list(self._landings)
        for task in landings:
            task.cancel()
        try:
            await outlast(landings)
        finally:
            # A task that was cancelled before it began has not released its buffer.
            for buffer in (*self._credited, *self._landing.values()):
                buffer.release()
            self._credited.clear()
            self._landing.clear()

    async def _take(self) -> None:
        side, sender = self.side, self._ticket.sender
        await self._line.say(
            OpenHandover(
                self._ticket.handover_id,
                self._around.identity,
                sender.instance_id,
                self._around.ring.buffer_bytes,
                self._ticket.num_positions if self._ticket.is_probe else 0,
                self._wire_version,
            )
        )
        self._opened_at = now()
        while not side.ended:
            self._changed.clear()
            if side.state is ReceiverState.RESERVING:
                await self._reserve()
            while side.wants_credit and self._in_flight < MAX_IN_FLIGHT:
                with self._around.stats.timed("buffer_wait"):
                    buffer = await self._around.ring.wait(sender.instance_id)
                await self._credit(buffer)
            if side.all_in:
                side.completed()
                if self._last_told_at:
                    self._around.stats.took("last_chunk", self._last_told_at)
                    left = self._received_bytes - self._received_when_told
                    self._around.stats.link.ended(left, now() - self._last_told_at)
                await self._line.say(Completed())
            elif not side.ended:
                await self._changed.wait()

    @property
    def _in_flight(self) -> int:
        return self.side.credits + len(self.side.landing)

    async def _credit(self, buffer: StagingBuffer | None) -> None:
        """Sends credits for a buffer that was waited for and all others that are free, at once."""
        num_kv_chunks = 0
        while buffer is not None:
            self._credited.append(buffer)
            self.side.credited()
            num_kv_chunks += 1
            more = self.side.wants_credit and self._in_flight < MAX_IN_FLIGHT
            buffer = self._around.ring.take(self._ticket.sender.instance_id) if more else None
        await self._line.say(Credit(num_kv_chunks))

    async def _reserve(self) -> None:
        with self._around.stats.timed("reserve"):
            from_position = await self._reserve_blocks()
        await self._around.faults.at("receiver.reserved")
        self._patience.moved()
        if from_position is None:
            self.side.full()
            await self._line.say(Full())
        else:
            self.side.granted(from_position)
            self._cached_positions = from_position
            await self._line.say(Granted(from_position))

    def _hear(self, message: SenderMessage) -> None:
        match message:
            case Announced(num_positions):
                self.side.announced(num_positions)
                self._around.stats.took("announce_wait", self._opened_at)
            case Finished(num_positions):
                self.side.advanced(num_positions)
                if num_positions == self.side.num_positions:
                    self._last_told_at = now()
                    self._received_when_told = self._received_bytes
            case KvChunkReady(header, buffer):
                self._arrive(header, buffer)
            case Tokens(choices):
                self.side.tokens()
                self._tokens = choices
            case Failed(error):
                raise TransferAborted(HandoverEvent.PEER_FAILED, error)
            case _:
                raise HandoverFailed("the sender sent a message out of place")
        self._patience.moved()
        self._changed.set()

    def _arrive(self, header: KvChunkHeader, remote_buffer: int) -> None:
        run = Run(header.index, header.first_position, header.num_positions)
        if replace(header, digest=b"") != self._sealer.header(run):
            raise self._mismatch("announcement")
        self.side.arriving(run)
        self._landing[run.index] = self._credited.popleft()
        task = asyncio.create_task(self._land(header, remote_buffer, self._newest))
        self._newest = task
        self._landings.add(task)
        task.add_done_callback(self._landed)

    async def _land(
        self, header: KvChunkHeader, remote_buffer: int, before: asyncio.Task[None] | None
    ) -> None:
        buffer, stats = self._landing[header.index], self._around.stats
        faults = self._around.faults
        try:
            await faults.at("receiver.reading")
            size = HEADER_BYTES + header.payload_bytes
            try:
                began = now()
                with stats.timed("read"):
                    await self._peer.reader.read(
                        self._ticket.sender.instance_id, remote_buffer, buffer, size, READ_S
                    )
                stats.link.read(size, now() - began)
            except TransportError:
                self._peer.suspect = True
                stats.transfer_errors += 1
                raise HandoverFailed("a KV chunk could not be read") from None
            await faults.at("receiver.read", buffer.view[:size])
            with stats.timed("verify"):
                if self._sealer.is_slow(header):
                    wrong = await to_end(
                        asyncio.to_thread(self._sealer.mismatch, header, buffer.view)
                    )
                else:
                    wrong = self._sealer.mismatch(header, buffer.view)
            if wrong:
                raise self._mismatch(wrong)
            await faults.at("receiver.verified")
            if before is not None:
                # Reads end in any order. Unpacking must not: the places that follow a KV chunk in
                # its last tile are cleared.
                await asyncio.wait([before])
            payload = buffer.view[HEADER_BYTES:size]
            with stats.timed("unpack"):
                await to_end(self._unpack(header.first_position, header.num_positions, payload))
            await faults.at("receiver.unpacked")
        finally:
            self._landing.pop(header.index).release()
        self.side.landed(header.index)
        self._received_bytes += header.payload_bytes
        stats.kv_chunks += 1
        stats.payload_bytes += header.payload_bytes
        await self._line.say(KvChunkCollected(header.index))
        self._patience.moved()
        self._changed.set()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._landings.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._trouble.done():
            self._trouble.set_exception(error)

    def _mismatch(self, kind: str) -> HandoverFailed:
        self._around.stats.mismatches[kind] += 1
        return HandoverFailed("a KV chunk is not what was announced")

    async def _fail_with_landings(self) -> None:
        await self._trouble

    async def _run_out_of_time(self) -> None:
        await asyncio.sleep(self._ticket.deadline_s)
        error = DeadlineExceeded("the hand-over ran out of time")
        raise TransferAborted(HandoverEvent.DEADLINE, error)
