"""A ModelRunner without torch, whose KV is hashes in place of tensors.

Every position's state is written into blocks, and the next token is a keyed hash of *all* states
that the extents refer to. A lost, stale, swapped or overwritten block therefore changes the tokens,
just as with a real model.

Per position the key is (token id, position) as two little-endian int32, and the value is a running
64-bit hash over the tokens so far: 16 bytes on the wire (`FakeMemory`).

With `state_positions` it also keeps a state, as recurrent layers do: every chunk replaces all of it
by a hash of it and the chunk's tokens, one after the other, and the next token depends on it, too.
A state that is lost, stale, shared, or went through a token twice therefore changes the tokens.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b, shake_128
from pathlib import Path

from batonlm.core.errors import Internal, InvalidArgument, NotFound
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.model import (
    DTYPE_BYTES,
    KV_DTYPES,
    AdapterDescription,
    KvLayout,
    ModelDescription,
    row_bytes,
)
from batonlm.core.request.prompt_logprobs import packed
from batonlm.core.scheduler.plan import (
    PENDING,
    BlockSwap,
    Chunk,
    KvPayload,
    SampledToken,
    SampleRow,
    ScoredTokens,
    StagingMemory,
    StepPlan,
    StepResult,
    in_host,
)
from batonlm.engine.kv.extents import Moved, check_extents, check_plan, owners, spans

KEY_SIZE = 8
VALUE_SIZE = 8
"""Bytes of one position's key, and of its value."""


class FakeMemory:
    """KV of a `FakeRunner`: per position a key and a value, in bytes.

    Keys and values are stored apart, as in the wire's layout. Memory is filled with 0xff,
    because unwritten memory must differ from the state of a first position.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_swap_blocks: int, lost: Iterable[int] = ()
    ):
        """num_swap_blocks: of host and disk together. lost: swap blocks that cannot be read back,
        as on a failing disk."""
        self._block_size = block_size
        self._planes = tuple(
            (bytearray(b"\xff" * (num_blocks * block_size * size)), size)
            for size in (KEY_SIZE, VALUE_SIZE)
        )
        self._stored = [b"\xff" * (block_size * (KEY_SIZE + VALUE_SIZE))] * num_swap_blocks
        self._lost = frozenset(lost)

    def read(self, extents: Extents, first_position: int, count: int) -> bytes:
        """Returns the keys, then the values, of consecutive positions."""
        places = list(spans(extents, first_position, count, self._block_size))
        return b"".join(
            memory[start * size : (start + length) * size]
            for memory, size in self._planes
            for start, length in places
        )

    def write(
        self, extents: Extents, first_position: int, count: int, data: bytes | memoryview
    ) -> None:
        """Writes what `read` returns."""
        done = 0
        for memory, size in self._planes:
            for start, length in spans(extents, first_position, count, self._block_size):
                end = done + length * size
                memory[start * size : (start + length) * size] = data[done:end]
                done = end

    def copy(self, copy: BlockCopy) -> None:
        for memory, size in self._planes:
            source, target = (b * self._block_size * size for b in (copy.source, copy.target))
            length = copy.num_positions * size
            memory[target : target + length] = memory[source : source + length]

    def swap_out(self, swap: BlockSwap) -> None:
        for block, place in zip(swap.blocks, swap.stored, strict=True):
            self._stored[place] = self.read(((block, 1),), 0, self._block_size)

    def swap_in(self, swap: BlockSwap) -> list[int]:
        """Copies blocks back. Returns the blocks that could not be read back."""
        missing = []
        for block, place in zip(swap.blocks, swap.stored, strict=True):
            if place in self._lost:
                missing.append(block)
            else:
                self.write(((block, 1),), 0, self._block_size, self._stored[place])
        return missing


class FakeRunner:
    """A ModelRunner whose tokens are hashes. Greedy tokens depend on the tokens so far and the
    adapters that computed them, sampled ones also on (seed, choice, position). Temperature,
    filters, penalties, biases and allowed tokens change nothing.

    eos_every: about one token in this many is the first end token; 0: none.
    step_seconds, token_seconds: duration of a step and additional duration per token; the thread
    sleeps, as a host waits for its device.
    delay_steps: a submitted step runs when it is collected, or when this many newer ones wait, so
    that memory that is freed too early is overwritten before it is read.
    poison_token_id: a chunk that ends with this token has invalid samples, as from NaN logits.
    wire_dtype: the dtype in its KV layout (auto: float32); the bytes do not depend on it.
    num_swap_blocks, depth: see ModelRunner. lost_swap_blocks: those that cannot be read back.
    state_positions: see KvLayout.
    """

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        vocab_size: int = 2048,
        max_model_len: int = 2048,
        eos_token_ids: tuple[int, ...] = (3,),
        *,
        eos_every: int = 0,
        step_seconds: float = 0.0,
        token_seconds: float = 0.0,
        delay_steps: int = 0,
        poison_token_id: int | None = None,
        num_swap_blocks: tuple[int, int] = (0, 0),
        lost_swap_blocks: Iterable[int] = (),
        depth: int = 1,
        name: str = "fake",
        tokenizer_digest: str = "",
        wire_dtype: str = "auto",
        state_positions: int = 0,
    ):
        dtype = KV_DTYPES["float32" if wire_dtype == "auto" else wire_dtype]
        scale_bytes = row_bytes(dtype, 1) - DTYPE_BYTES[dtype]
        about = f"{vocab_size} {eos_token_ids} {eos_every}"
        if state_positions:
            about += f" {state_positions}"
        digest = blake2b(about.encode(), digest_size=16)
        self._model = ModelDescription(
            name=name,
            digest=digest.hexdigest(),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer_digest=tokenizer_digest,
        )
        self._layout = KvLayout(
            model_digest=self._model.digest,
            dtype=dtype,
            num_layers=1,
            num_kv_heads=1,
            key_size=(KEY_SIZE - scale_bytes) // DTYPE_BYTES[dtype],
            value_size=(VALUE_SIZE - scale_bytes) // DTYPE_BYTES[dtype],
            state_positions=state_positions,
        )
        self._first_place = self._layout.place(0, 1, block_size)
        """Of position 0 in a table: behind the state."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._eos_every = eos_every
        self._step_seconds, self._token_seconds = step_seconds, token_seconds
        self._delay_steps = delay_steps
        self._poison = poison_token_id
        self._num_swap_blocks = num_swap_blocks
        self._depth = depth
        self._memory = FakeMemory(num_blocks, block_size, sum(num_swap_blocks), lost_swap_blocks)
        # A step may use tokens that a step in flight has not sampled yet.
        self._sampled: deque[dict[int, int]] = deque(maxlen=depth + delay_steps)
        self._waiting: deque[StepPlan] = deque()
        self._done: deque[StepResult] = deque()
        self._adapters: dict[str, AdapterDescription] = {}

    @property
    def model(self) -> ModelDescription:
        return self._model

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_swap_blocks(self) -> tuple[int, int]:
        return self._num_swap_blocks

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def copies_beside_steps(self) -> bool:
        """False: its steps may run late, and on any thread."""
        return False

    @property
    def exact(self) -> bool:
        return True

    def load_adapter(self, folder: Path) -> AdapterDescription:
        """Of any folder that has files; they are not looked at beyond their digest."""
        try:
            files = sorted(path for path in folder.iterdir() if path.is_file())
            contents = [file.read_bytes() for file in files]
        except OSError:
            files = []
        if not files:
            raise InvalidArgument(f"adapter {folder.name}: it has no files", field="adapter")
        digest = blake2b(digest_size=16)
        for file, content in zip(files, contents, strict=True):
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        found = AdapterDescription(folder.name, digest.hexdigest(), 8, sum(map(len, contents)))
        self._adapters[found.digest] = found
        return found

    def unload_adapter(self, digest: str) -> None:
        if self._adapters.pop(digest, None) is None:
            raise NotFound("This worker has no such adapter.", field="adapter")

    def submit(self, plan: StepPlan) -> None:
        check_plan(plan, self)
        for chunk in plan.chunks:
            if chunk.adapter and chunk.adapter not in self._adapters:
                raise Internal(f"adapter {chunk.adapter} is not loaded")
        self._waiting.append(plan)
        while len(self._waiting) > self._delay_steps:
            self._run_oldest()

    def collect(self) -> StepResult:
        if not self._done:
            if not self._waiting:
                raise Internal("no step was submitted")
            self._run_oldest()
        return self._done.popleft()

    @property
    def on_device(self) -> bool:
        return False

    def staging_memory(self, num_buffers: int, buffer_bytes: int) -> StagingMemory | None:
        return None

    def share(self, fd: int, address: int, num_bytes: int) -> Callable[[], None]:
        return lambda: None

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        self._check_payload(extents, first_position, count, out)
        in_host(out).cast("B")[:] = self._memory.read(extents, first_position, count)

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        self._check_payload(extents, first_position, count, payload)
        self._memory.write(extents, first_position, count, in_host(payload).cast("B"))

    def close(self) -> None:
        self._waiting.clear()
        self._done.clear()

    def _check_payload(
        self, extents: Extents, first_position: int, count: int, payload: KvPayload
    ) -> None:
        check_extents(extents, first_position + count, self._num_blocks, self._block_size)
        if payload.nbytes != count * self._layout.bytes_per_position:
            raise Internal("the payload's size does not fit its positions")

    def _run_oldest(self) -> None:
        plan = self._waiting.popleft()
        done = time.perf_counter() + self._step_seconds + plan.num_tokens * self._token_seconds
        moved = self._move(plan)
        for copy in plan.copies:
            self._memory.copy(copy)
        tokens: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        scored: list[ScoredTokens] = []
        for chunk in plan.chunks:
            token_ids = self._known(chunk)
            self._write(chunk, token_ids)
            states = self._advance(chunk, token_ids)
            if chunk.scored is not None:
                scored.append(self._score(chunk, states))
            drawn_from = len(token_ids) - 1 - chunk.num_drafts
            for i, row in enumerate(chunk.samples):
                at = drawn_from + i if chunk.num_drafts else drawn_from
                token, reason = None, "logits are not numbers"
                if token_ids[at] != self._poison:
                    seen = self._attend(chunk, chunk.first_position + at + 1, states[at])
                    token, reason = self._draw(seen, row), "every token is banned"
                if token is not None:
                    tokens.append(token)
                elif at == drawn_from:
                    failed.append((row.sequence_id, reason))
                if token is None and chunk.num_drafts:
                    break
        # The hashing counts as part of the step's duration.
        left = done - time.perf_counter()
        if left > 0.0:
            time.sleep(left)
        result = StepResult(plan.step, tuple(tokens), tuple(failed), scored=tuple(scored))
        result = moved.applied_to(result)
        # Of tokens behind drafts nobody knows yet which one is the last.
        drafted = {chunk.sequence_id for chunk in plan.chunks if chunk.num_drafts}
        self._sampled.append(
            {t.sequence_id: t.token_id for t in result.tokens if t.sequence_id not in drafted}
        )
        self._done.append(result)

    def _move(self, plan: StepPlan) -> Moved:
        if not plan.swap_out and not plan.swap_in:
            return Moved()
        began = time.perf_counter()
        for swap in plan.swap_out:
            self._memory.swap_out(swap)
        missing = {block for swap in plan.swap_in for block in self._memory.swap_in(swap)}
        return Moved(time.perf_counter() - began, owners(plan, missing))

    def _known(self, chunk: Chunk) -> Sequence[int]:
        """Returns the chunk's tokens. A token that was never sampled gets a placeholder, which
        changes all later tokens."""
        if tuple(chunk.token_ids) != (PENDING,):
            return chunk.token_ids
        of_steps = (tokens.get(chunk.sequence_id) for tokens in reversed(self._sampled))
        return (next((token for token in of_steps if token is not None), PENDING),)

    def _write(self, chunk: Chunk, token_ids: Sequence[int]) -> None:
        position, count = chunk.first_position, len(token_ids)
        state = b""
        if position:
            state = self._memory.read(chunk.extents, self._first_place + position - 1, 1)[KEY_SIZE:]
        keys, values = [], []
        for offset, token_id in enumerate(token_ids):
            key = struct.pack("<ii", token_id, position + offset)
            whole = state + key + chunk.adapter.encode()
            state = blake2b(whole, digest_size=VALUE_SIZE, key=b"state").digest()
            keys.append(key)
            values.append(state)
        place = self._first_place + position
        self._memory.write(chunk.extents, place, count, b"".join((*keys, *values)))

    def _advance(self, chunk: Chunk, token_ids: Sequence[int]) -> list[bytes]:
        """Returns the state behind each of the chunk's positions, and keeps the last one. Without
        a state they are empty."""
        size = self._layout.state_positions
        if not size:
            return [b""] * len(token_ids)
        state = bytes(size * (KEY_SIZE + VALUE_SIZE))
        if chunk.first_position:
            state = self._memory.read(chunk.extents, 0, size)
        states = []
        copied = {copy.position: copy.extents for copy in chunk.state_copies}
        for position, token_id in enumerate(token_ids, chunk.first_position + 1):
            whole = state + struct.pack("<i", token_id) + chunk.adapter.encode()
            state = shake_128(whole).digest(len(state))
            states.append(state)
            if position in copied:
                self._memory.write(copied[position], 0, size, state)
        self._memory.write(chunk.extents, 0, size, state)
        return states

    def _score(self, chunk: Chunk, states: Sequence[bytes]) -> ScoredTokens:
        """Returns negative scores from a hash of all that each position can see and of the token
        after it. The alternatives are the ids from 0 on, with lower scores."""
        assert chunk.scored is not None
        tokens, num_top = chunk.scored
        own = []
        for offset, token in enumerate(tokens):
            seen = self._attend(chunk, chunk.first_position + offset + 1, states[offset])
            lot = blake2b(seen + struct.pack("<i", token), digest_size=2, key=b"score").digest()
            own.append(-int.from_bytes(lot) / 4096)
        alternatives = [-16.0 - i for i in range(num_top)] * len(tokens)
        logprobs = packed(num_top, own, [*range(num_top)] * len(tokens), alternatives)
        return ScoredTokens(chunk.sequence_id, chunk.first_position, logprobs)

    def _attend(self, chunk: Chunk, end: int, state: bytes) -> bytes:
        """Returns a hash of everything that the position before `end` can see."""
        everything = self._memory.read(chunk.extents, self._first_place, end) + state
        return blake2b(everything, digest_size=16, key=b"attend").digest()

    def _draw(self, seen: bytes, row: SampleRow) -> SampledToken | None:
        """Returns None if every token is banned."""
        if not row.params.greedy:
            drawn_by = struct.pack("<QII", row.params.seed % 2**64, row.choice, row.position)
            seen = blake2b(seen + drawn_by, digest_size=16, key=b"draw").digest()
        number, lot = struct.unpack("<QQ", seen)
        eos = self._model.eos_token_ids
        allowed_eos = [t for t in eos if t not in row.banned and _allows(row, t)]
        if allowed_eos and self._eos_every and lot % self._eos_every == 0:
            token: int | None = allowed_eos[0]
        else:
            token = self._next_free(number, row, {*eos, *row.banned})
        if token is None:
            token = allowed_eos[0] if allowed_eos else None
        if token is None:
            return None
        return SampledToken(row.sequence_id, row.choice, token, self._logprobs(token, row))

    def _next_free(self, number: int, row: SampleRow, taken: Iterable[int]) -> int | None:
        vocab = self._model.vocab_size
        if row.allowed:
            free = [t for t in range(vocab) if t not in taken and _allows(row, t)]
            return free[number % len(free)] if free else None
        token = number % vocab
        for _ in range(vocab):
            if token not in taken:
                return token
            token = (token + 1) % vocab
        return None

    def _logprobs(self, token: int, row: SampleRow) -> Logprobs | None:
        """Returns probabilities that halve from one to the next; the sampled token is the most
        likely one."""
        wanted = row.params.top_logprobs
        if wanted is None:
            return None
        vocab = self._model.vocab_size
        top = (((token + i) % vocab, -(i + 1) * math.log(2)) for i in range(min(wanted, vocab)))
        return Logprobs(-math.log(2), tuple(top))


def _allows(row: SampleRow, token: int) -> bool:
    if not row.allowed:
        return True
    byte = token >> 3
    return byte < len(row.allowed) and bool(row.allowed[byte] >> (token & 7) & 1)
