"""The values between scheduler and runner, what to compute and what came out; and the ports.

Plain data: a runner sees nothing else. A value does not change once it is made; those that a step
has hundreds of are NamedTuples, because a frozen dataclass takes 1 µs to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from batonlm.core.errors import Internal
from batonlm.core.handover.leaf_hash import Points
from batonlm.core.kvcache.block_pool import BlockCopy, Extents
from batonlm.core.request.attempt import Logprobs
from batonlm.core.request.model import AdapterDescription, KvLayout, ModelDescription
from batonlm.core.request.prompt_logprobs import PromptLogprobs
from batonlm.core.request.request import SamplingParams

PENDING = -1
"""As a chunk's only token id: the token that the newest earlier step samples for this sequence.

It lets a step be planned while the one before it still runs. The runner fills it in; if that step
sampled nothing for the sequence, whatever this one samples for it is worthless and is dropped.
"""


class SampleRow(NamedTuple):
    """One token to draw from the logits of a chunk's last position. choice, position and
    params.seed key its random number."""

    sequence_id: int
    choice: int
    position: int
    """Output position of the drawn token."""
    params: SamplingParams
    banned: tuple[int, ...] = ()
    """Tokens that must not be drawn (end tokens before min_tokens)."""
    history: Sequence[int] = ()
    """Prompt and output so far, given only when params.needs_history."""
    num_prompt_tokens: int = 0
    """How many tokens of the history are the prompt."""
    allowed: bytes = b""
    """A bit for each token id that may be drawn, least significant first (ids behind its end may
    not), or empty: all may. What is not allowed is banned."""


class Scored(NamedTuple):
    """Tokens of a prompt whose log-probabilities are wanted."""

    tokens: Sequence[int]
    """tokens[i] comes behind the chunk's i-th position."""
    num_top: int
    """How many alternatives to report with each."""


class StateCopy(NamedTuple):
    """A copy of a sequence's state that a step makes while it computes a chunk."""

    position: int
    """It is the state behind all positions below this one."""
    extents: Extents
    """As many blocks as a state has."""


class Chunk(NamedTuple):
    """Consecutive positions of one sequence that this step computes."""

    sequence_id: int
    """Local to the worker."""
    token_ids: Sequence[int]
    """The inputs at positions first_position, first_position + 1, …"""
    first_position: int
    extents: Extents
    """Of the whole table: the blocks of the state, where the model has one, then those of all
    positions up to the last one. The chunk finds the state as it is behind first_position, where
    0 means that there is none yet whatever lies there, and leaves the one behind end_position."""
    samples: tuple[SampleRow, ...] = ()
    """Empty unless the last position's logits are needed; a prompt with n choices has n, and a
    chunk with drafts one for each of its last num_drafts + 1 positions."""
    scored: Scored | None = None
    """Set when tokens of the prompt are scored; none of them lies behind the last position of a
    chunk with samples."""
    adapter: str = ""
    """The digest of the adapter that its sequence is computed with; "" is the model alone."""
    state_copies: tuple[StateCopy, ...] = ()
    """In the order of their positions, which lie behind first_position and up to end_position."""
    num_drafts: int = 0
    """How many of its last inputs are drafts: tokens that nobody has drawn yet. Those of its
    samples that are behind a draft have no history: it is the first one's, with the drafts up to
    there."""

    @property
    def end_position(self) -> int:
        return self.first_position + len(self.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether it is one position of its sequence, alone or with drafts behind it."""
        return len(self.token_ids) == 1 + self.num_drafts

    @property
    def wanted(self) -> list[int]:
        """Positions, counted from the chunk's first one, whose logits are needed, in order."""
        rows = [] if self.scored is None else list(range(len(self.scored.tokens)))
        if self.samples:
            rows += range(len(self.token_ids) - 1 - self.num_drafts, len(self.token_ids))
        return rows


@dataclass(frozen=True, slots=True)
class BlockSwap:
    """Whole blocks that are moved out to swap memory, or in from it."""

    blocks: tuple[int, ...]
    """Of the pool."""
    stored: tuple[int, ...]
    """For each of them its block of swap memory. Ids count from 0: first those in host memory, then
    those on disk."""


class StepWork(NamedTuple):
    """What a step has to compute, counted."""

    rows: int = 0
    """Chunks of one running sequence's next position."""
    context: int = 0
    """Positions that those rows read."""
    prefill: int = 0
    """Positions of the other chunks."""
    drafts: int = 0
    """Positions of drafts behind rows."""
    drafting_s: float = 0.0
    """Seconds of the device that finding drafts took, while the step was planned."""


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. First blocks are swapped out, then in, then copied; then it computes, and
    copies states on its way. So a block may be swapped out and get its next owner within one
    step."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockSwap, ...] = ()
    swap_in: tuple[BlockSwap, ...] = ()
    work: StepWork = NO_WORK
    """By which a step's time is predicted; runners need not look at it."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def scores(self) -> bool:
        """Whether tokens of a prompt are scored."""
        return any(chunk.scored is not None for chunk in self.chunks)


class SampledToken(NamedTuple):
    """One drawn token, in the order of the plan's chunks and their samples.

    Of a chunk with drafts they come up to the first that could not be drawn, whatever the drafts
    were worth. A token counts if the drafts before it are the tokens drawn in their places.
    """

    sequence_id: int
    choice: int
    token_id: int
    logprobs: Logprobs | None = None


class ScoredTokens(NamedTuple):
    """The entries of one chunk's scored tokens, from the one behind its first position on."""

    sequence_id: int
    first_position: int
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made."""

    step: int
    tokens: tuple[SampledToken, ...]
    failed: tuple[tuple[int, str], ...] = ()
    """Sequences whose own inputs made sampling fail, with a reason. One with drafts is here only if
    its first token could not be drawn."""
    swap_s: float = 0.0
    """Seconds that moving blocks to and from swap memory took."""
    scored: tuple[ScoredTokens, ...] = ()
    """One for each chunk with `Chunk.scored`."""


# What core needs from outside, as protocols; each ships with a double that passes its tests.


class KvPayload(Protocol):
    """Bytes of a KV chunk where they lie: a memoryview in memory of the host, and what the runner's
    own staging memory is made of elsewhere."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> KvPayload: ...


def in_host(payload: KvPayload) -> memoryview:
    """The same, for whoever has memory of the host only. Raises Internal for any other."""
    if not isinstance(payload, memoryview):
        raise Internal("this payload is not in the host's memory")
    return payload


class MemoryRegion(NamedTuple):
    """Memory of one device, or of the host, under one address."""

    address: int
    num_bytes: int
    device_id: int
    """As NIXL counts devices."""


class StagingMemory(Protocol):
    """Memory from which staging buffers are cut, aligned to 4096 bytes. Read and written from any
    thread. `batonlm.transfer.staging.HostMemory` is the host's; a runner may have another."""

    @property
    def in_host(self) -> bool:
        """Whether parts are memoryviews."""

    @property
    def kind(self) -> str:
        """As NIXL names it: DRAM or VRAM."""

    @property
    def regions(self) -> Sequence[MemoryRegion]:
        """Where it is: one region, or several among which buffers are dealt out, see
        `batonlm.transfer.staging.place_of`."""

    def part(self, start: int, num_bytes: int) -> KvPayload:
        """Within one buffer; they are counted as if all lay one after the other."""

    def read(self, part: KvPayload) -> bytes:
        """A copy of its bytes in the host."""

    def write(self, part: KvPayload, data: bytes) -> None:
        """data: as many bytes as the part has."""

    def leaf_hashes(self, part: KvPayload, points: Points) -> bytes:
        """See `batonlm.core.handover.leaf_hash`. As slow as a copy; not for the event loop."""

    def close(self) -> None:
        """Frees the memory. Only when nothing can touch it any more; idempotent."""


class ModelRunner(Protocol):
    """Runs steps of one model over one block pool's memory.

    Called by the engine thread only, but for copies (`copies_beside_steps`). `submit` starts a step
    and may return before it is done; `collect` waits for the oldest submitted one. Steps complete
    in the order submitted. Doubles: `batonlm.testing.fake_runner.FakeRunner` (no torch), real:
    `batonlm.engine.runner.TorchRunner`.
    """

    @property
    def model(self) -> ModelDescription: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_swap_blocks(self) -> tuple[int, int]:
        """Blocks of swap memory: in host memory, on disk."""

    @property
    def depth(self) -> int:
        """How many steps may be submitted before the oldest is collected; 1 where `submit`
        computes, 2 where the next step is better prepared while one runs."""

    @property
    def copies_beside_steps(self) -> bool:
        """Whether pack and unpack may be called on another thread while a step runs, for positions
        that no step in flight writes (pack) or reads (unpack). They return when the copy is done,
        on a GPU too."""

    @property
    def on_device(self) -> bool:
        """Whether KV is kept in a device's memory, and not in the host's."""

    def staging_memory(self, num_buffers: int, buffer_bytes: int) -> StagingMemory | None:
        """Memory of the runner's devices for so many buffers, from and to which KV is copied
        without passing the host; the caller closes it before the runner. None where there is none:
        KV is kept in the host or on several machines, or a position's is not a whole number of
        words. Raises Unavailable when none is left, or devices do not reach each other's."""

    def share(self, fd: int, address: int, num_bytes: int) -> Callable[[], None]:
        """Prepares for payloads that lie in this memory of the host, which the process has mapped
        from the file `fd` at `address`. Called at most once, before the first pack.

        Returns what undoes it; that is called before the memory is unmapped, when no copy runs.
        """

    def load_adapter(self, folder: Path) -> AdapterDescription:
        """Reads a LoRA adapter, whose digest chunks may name from then on. Its name is the
        folder's. On any thread, beside steps; again for what is loaded already changes nothing.

        Raises InvalidArgument (`adapter`) for what cannot be served as it is, and Overloaded where
        the memory for adapters is full.
        """

    def unload_adapter(self, digest: str) -> None:
        """Frees its memory. On the engine thread, when no step in flight names it. Raises NotFound
        for one that is not loaded."""

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def pack(self, extents: Extents, first_position: int, count: int, out: KvPayload) -> None:
        """Writes KV of `count` positions from first_position into `out` in the wire layout.

        first_position counts from the start of the extents, where the state lies if the model has
        one (`KvLayout.place`).

        `out` has exactly count * layout.bytes_per_position bytes, in memory of the host or in the
        runner's own staging memory. The step that wrote these
        positions has been collected.
        """

    def unpack(self, extents: Extents, first_position: int, count: int, payload: KvPayload) -> None:
        """The inverse of pack. The blocks are owned by the sequence and no step reads them yet.

        In position order: what follows the last position in its block may be cleared.
        """

    def close(self) -> None:
        """Frees memory and threads, once no step in flight can touch them; such steps are dropped.
        Idempotent."""


class Matcher(Protocol):
    """One choice's way through a grammar: a function of the tokens it has so far, so that a choice
    may go on wherever these are known. Engine thread only. Double: `tests.core.grammars`, real:
    `batonlm.grammar.book.TokenMatcher`.
    """

    def allowed(self, tokens: Sequence[int], first: int) -> bytes:
        """Which tokens may be drawn next: a bit for each id, least significant first.

        tokens: of the choice; its output begins at index `first` and only ever grows. An end token
        is among them where the grammar is satisfied, and alone where nothing can follow. All bits
        are 0 when no token can be drawn; then `stuck` has the reason.
        """

    def allowed_behind(
        self, tokens: Sequence[int], first: int, drafts: Sequence[int]
    ) -> list[bytes]:
        """As `allowed`, and the same behind each draft up to the first that is not allowed itself.
        The state is that behind `tokens` again."""

    @property
    def stuck(self) -> str:
        """Why nothing can be drawn any more, in words for the client, or ""."""


class CompiledGrammar(Protocol):
    """A grammar in terms of one model's tokens."""

    def matcher(self) -> Matcher:
        """A new choice's, which has no output yet."""
