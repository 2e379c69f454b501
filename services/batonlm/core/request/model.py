"""The description of a model and the shape of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

WIRE_VERSION = 1
"""The newest version of the hand-over protocol (Collect messages, KV chunks, payload) that this
build supports."""

OLDEST_WIRE_VERSION = 1
"""The oldest supported version. Supporting the previous one keeps KV transfers working during a
rolling upgrade."""

SCALED_INT8 = "int8_scaled"
SCALED_FP8 = "fp8_scaled"
SCALED = (SCALED_INT8, SCALED_FP8)
"""Numbers of one byte, whole ones from -127 to 127 or e4m3 without infinities. The keys of a
position and head, and its values, have a scale each: a power of two in one byte, its exponent
plus 127."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, SCALED_INT8: 1, SCALED_FP8: 1}
"""Number types of KV, with bytes per number."""

KV_DTYPES = {name.removesuffix("_scaled"): name for name in DTYPE_BYTES}
"""The number types of KV by the names that options give them."""


def row_bytes(dtype: str, size: int) -> int:
    """Bytes of `size` numbers, the keys or values of one position and head, with their scale."""
    return size * DTYPE_BYTES[dtype] + (dtype in SCALED and size > 0)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of KV on the wire. Two workers can hand over only when `difference` is empty.

    The payload of a position is, per layer, its keys, then its values, each [num_kv_heads, size].
    The payload of a KV chunk is laid out as [layer][key, value][position][head][element]. Of
    SCALED types, a layer's scales follow behind its values: [key, value][position][head].
    """

    model_digest: str
    dtype: str
    """The number type on the wire. Each worker stores its KV in a type of its own."""
    num_layers: int
    num_kv_heads: int
    key_size: int
    value_size: int
    """0 where a value is the start of its key, as of latents, so that keys alone are kept."""
    state_positions: int = 0
    """As many positions' rows as one sequence's state takes: what recurrent layers keep of all that
    came before, in place of KV of each position. 0: the model has none. The state lies in blocks of
    its own at the front of a sequence's table, and behind the last position on the wire."""
    min_wire_version: int = field(default_factory=lambda: OLDEST_WIRE_VERSION)
    max_wire_version: int = field(default_factory=lambda: WIRE_VERSION)

    @property
    def bytes_per_position(self) -> int:
        rows = row_bytes(self.dtype, self.key_size) + row_bytes(self.dtype, self.value_size)
        return self.num_layers * self.num_kv_heads * rows

    def state_blocks(self, block_size: int) -> int:
        """Blocks at the front of a table that hold the state."""
        return -(-self.state_positions // block_size)

    def place(self, position: int, num_positions: int, block_size: int) -> int:
        """Where the table of a sequence has a position of its hand-over, counted in positions from
        the table's first block on. The hand-over has num_positions of KV, and the state's behind
        them."""
        if position >= num_positions:
            return position - num_positions
        return self.state_blocks(block_size) * block_size + position

    def common_wire_version(self, other: KvLayout) -> int:
        """Returns the newest version that both support. `difference` must be empty."""
        return min(self.max_wire_version, other.max_wire_version)

    def difference(self, other: KvLayout) -> str:
        """Returns a readable list of the differences, or "" when the two are compatible."""
        names = [f.name for f in fields(self) if not f.name.endswith("wire_version")]
        found = [
            f"{name}: {getattr(self, name)} against {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]
        if (
            self.max_wire_version < other.min_wire_version
            or other.max_wire_version < self.min_wire_version
        ):
            found.append(
                f"wire versions: {self.min_wire_version}-{self.max_wire_version} against "
                f"{other.min_wire_version}-{other.max_wire_version}"
            )
        return "; ".join(found)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The formats in which a model writes its answers, as found in its chat template."""

    tools: str = ""
    """The name of the tool format; empty when the template shows none."""
    reasoning: str = ""
    """The name of the reasoning format; empty when the template shows none."""
    markers: tuple[tuple[str, int], ...] = ()
    """Texts that are one token of the vocabulary, each with its token id."""


class ModelTask(Enum):
    """What a model makes of an input."""

    GENERATE = 1
    """Text that continues it."""
    EMBED = 2
    """The vector of a text."""
    SCORE = 3
    """The score of a pair of texts."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What other processes need to know about a model."""

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str = ""
    """In hex, over the tokenizer's files."""
    answer_format: AnswerFormat = AnswerFormat()
    """Reported by tokenizers only."""
    task: ModelTask = ModelTask.GENERATE
    vector_size: int = 0
    """Numbers of each vector that it makes."""


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """A LoRA adapter: small matrices that are added to a model's own."""

    name: str
    digest: str
    """In hex, over its files."""
    rank: int
    """The largest of its matrices'."""
    num_bytes: int
    """Of a worker's memory while it is ready to compute."""
    path: str = ""
    """Its folder, relative to the one from which workers load adapters at run time; "" where it is
    not below that."""
    on_use: bool = False
    """Loaded because a request named it: it may make room for another one, and no operator wants it
    everywhere."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identifies one worker process."""

    role: str
    instance_id: str
    """A random id of this process start, 32 hex digits."""
    address: str

    @property
    def short(self) -> str:
        """The first 8 digits of the instance id. They suffice to distinguish processes, not to
        address one."""
        return self.instance_id[:8]
