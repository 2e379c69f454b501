"""A runner without torch: the ModelRunner port over a memory of hashes; knows no model at all.

Its KV is real in the one way that matters: every position's state is written into blocks, and the
next token is a keyed hash of *all* states that the extents point at. A block that was lost, stale,
swapped or overwritten therefore gives other tokens, just as it would with a real model.

Per position the key is (token id, position) as two little-endian int32 and the value is a running
64-bit hash over the tokens so far, which makes 16 bytes on the wire.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from baton.core.attempt import Logprobs
from baton.core.errors import Internal
from baton.core.model import KvLayout, ModelDescription
from baton.core.plan import BlockCopy, Chunk, Extents, SampledToken, SampleRow, StepPlan, StepResult
from baton.engine.check import check_extents, check_plan
from baton.engine.spans import spans

_KEY = 8
_VALUE = 8


class FakeRunner:
    """ModelRunner whose tokens are hashes. Greedy tokens depend on the tokens so far, drawn ones
    also on (seed, choice, position); temperature, filters, penalties and biases change nothing.

    eos_every: about one token in so many is the first end token; 0 means none ever.
    step_seconds: how long a step takes. delay_steps: a submitted step runs when it is collected or
    when so many newer ones are waiting, so that memory freed too early is seen to be overwritten.
    poison_token_id: a chunk that ends with this token makes its samples fail, as NaN logits would.
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
        delay_steps: int = 0,
        poison_token_id: int | None = None,
        name: str = "fake",
        tokenizer_digest: str = "",
    ):
        digest = blake2b(f"{vocab_size} {eos_token_ids} {eos_every}".encode(), digest_size=16)
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
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            key_size=_KEY // 4,
            value_size=_VALUE // 4,
        )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._eos_every = eos_every
        self._step_seconds = step_seconds
        self._delay_steps = delay_steps
        self._poison = poison_token_id
        # Never written memory must not look like a start, hence 0xff.
        self._keys = bytearray(b"\xff" * (num_blocks * block_size * _KEY))
        self._values = bytearray(b"\xff" * (num_blocks * block_size * _VALUE))
        self._waiting: deque[StepPlan] = deque()
        self._done: deque[StepResult] = deque()

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
        return 0, 0

    @property
    def depth(self) -> int:
        return 1

    @property
    def exact(self) -> bool:
        return True

    def submit(self, plan: StepPlan) -> None:
        check_plan(
            plan,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
        )
        self._waiting.append(plan)
        while len(self._waiting) > self._delay_steps:
            self._run_oldest()

    def collect(self) -> StepResult:
        if not self._done:
            if not self._waiting:
                raise Internal("no step was submitted")
            self._run_oldest()
        return self._done.popleft()

    def pack(self, extents: Extents, first_position: int, count: int, out: memoryview) -> None:
        self._check_payload(extents, first_position, count, out)
        out = out.cast("B")
        places = list(spans(extents, first_position, count, self._block_size))
        out[: count * _KEY] = _gather(self._keys, places, _KEY)
        out[count * _KEY :] = _gather(self._values, places, _VALUE)

    def unpack(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        self._check_payload(extents, first_position, count, payload)
        payload = payload.cast("B")
        done = 0
        for start, length in spans(extents, first_position, count, self._block_size):
            key, value = done * _KEY, count * _KEY + done * _VALUE
            self._keys[start * _KEY : (start + length) * _KEY] = payload[key : key + length * _KEY]
            self._values[start * _VALUE : (start + length) * _VALUE] = payload[
                value : value + length * _VALUE
            ]
            done += length

    def close(self) -> None:
        self._waiting.clear()
        self._done.clear()

    def _check_payload(
        self, extents: Extents, first_position: int, count: int, payload: memoryview
    ) -> None:
        check_extents(extents, first_position + count, self._num_blocks, self._block_size)
        if payload.nbytes != count * self._layout.bytes_per_position:
            raise Internal("the payload's size does not fit its positions")

    def _run_oldest(self) -> None:
        plan = self._waiting.popleft()
        if self._step_seconds:
            time.sleep(self._step_seconds)
        for copy in plan.copies:
            self._copy(copy)
        tokens: list[SampledToken] = []
        failed: list[tuple[int, str]] = []
        for chunk in plan.chunks:
            self._write(chunk)
            if chunk.samples and chunk.token_ids[-1] == self._poison:
                failed += [(row.sequence_id, "logits are not numbers") for row in chunk.samples]
            elif chunk.samples:
                seen = self._attend(chunk)
                tokens += [self._draw(seen, row) for row in chunk.samples]
        self._done.append(StepResult(plan.step, tuple(tokens), tuple(failed)))

    def _copy(self, copy: BlockCopy) -> None:
        for memory, size in ((self._keys, _KEY), (self._values, _VALUE)):
            source, target = (b * self._block_size * size for b in (copy.source, copy.target))
            length = copy.num_positions * size
            memory[target : target + length] = memory[source : source + length]

    def _write(self, chunk: Chunk) -> None:
        state = b""
        if chunk.first_position:
            places = list(spans(chunk.extents, chunk.first_position - 1, 1, self._block_size))
            state = _gather(self._values, places, _VALUE)
        position = chunk.first_position
        count = len(chunk.token_ids)
        done = 0
        for start, length in spans(chunk.extents, position, count, self._block_size):
            for place in range(start, start + length):
                key = struct.pack("<ii", chunk.token_ids[done], position + done)
                state = blake2b(state + key, digest_size=_VALUE, key=b"state").digest()
                self._keys[place * _KEY : (place + 1) * _KEY] = key
                self._values[place * _VALUE : (place + 1) * _VALUE] = state
                done += 1

    def _attend(self, chunk: Chunk) -> bytes:
        """A hash of everything that the chunk's last position can see."""
        places = list(spans(chunk.extents, 0, chunk.end_position, self._block_size))
        seen = blake2b(_gather(self._keys, places, _KEY), digest_size=16, key=b"attend")
        seen.update(_gather(self._values, places, _VALUE))
        return seen.digest()

    def _draw(self, seen: bytes, row: SampleRow) -> SampledToken:
        if not row.params.greedy:
            drawn_by = struct.pack("<QII", row.params.seed % 2**64, row.choice, row.position)
            seen = blake2b(seen + drawn_by, digest_size=16, key=b"draw").digest()
        number, lot = struct.unpack("<QQ", seen)
        eos = self._model.eos_token_ids
        allowed_eos = [token for token in eos if token not in row.banned]
        if allowed_eos and self._eos_every and lot % self._eos_every == 0:
            token = allowed_eos[0]
        else:
            token = self._next_free(number, {*eos, *row.banned})
        return SampledToken(row.sequence_id, row.choice, token, self._logprobs(token, row))

    def _next_free(self, number: int, taken: Iterable[int]) -> int:
        vocab = self._model.vocab_size
        token = number % vocab
        for _ in range(vocab):
            if token not in taken:
                break
            token = (token + 1) % vocab
        return token

    def _logprobs(self, token: int, row: SampleRow) -> Logprobs | None:
        """Halving probabilities, the drawn token the most likely one."""
        wanted = row.params.top_logprobs
        if wanted is None:
            return None
        vocab = self._model.vocab_size
        top = (((token + i) % vocab, -(i + 1) * math.log(2)) for i in range(min(wanted, vocab)))
        return Logprobs(-math.log(2), tuple(top))


def _gather(memory: bytearray, places: list[tuple[int, int]], size: int) -> bytes:
    return b"".join(memory[start * size : (start + length) * size] for start, length in places)
