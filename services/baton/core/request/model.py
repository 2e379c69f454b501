"""What a model is and what shape its KV has."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

WIRE_VERSION = 1
"""The newest form of hand-overs that this build speaks: messages of Collect, KV chunks, payload."""

OLDEST_WIRE_VERSION = 1
"""The oldest one. While a build is rolled out that speaks the one before, too, KV keeps moving."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Number types of KV on the wire, and the bytes of a number. fp8 is e4m3 without infinities."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of KV on the wire. Two workers may hand over only when `difference` is empty.

    dtype: the numbers' type on the wire; each worker keeps its KV in a type of its own.
    A position's payload is, per layer, its keys then its values, each [num_kv_heads, size].
    A KV chunk's payload over positions is laid out [layer][key, value][position][head][element].
    """

    model_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    key_size: int
    value_size: int
    min_wire_version: int = field(default_factory=lambda: OLDEST_WIRE_VERSION)
    max_wire_version: int = field(default_factory=lambda: WIRE_VERSION)

    @property
    def bytes_per_position(self) -> int:
        elements = self.num_layers * self.num_kv_heads * (self.key_size + self.value_size)
        return elements * DTYPE_BYTES[self.dtype]

    def common_wire_version(self, other: KvLayout) -> int:
        """The newest that both speak, where `difference` is empty."""
        return min(self.max_wire_version, other.max_wire_version)

    def difference(self, other: KvLayout) -> str:
        """A readable list of what differs, or "" when KV of one fits the other."""
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
    """How a model writes its answers, as far as its chat template tells.

    tools, reasoning: names of formats, empty where the template shows none. markers: texts that
    are one token of its vocabulary, with the token.
    """

    tools: str = ""
    reasoning: str = ""
    markers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What other processes need to know of a model.

    tokenizer_digest: hex, over the tokenizer's files. answer_format: only tokenizers tell.
    """

    name: str
    digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str = ""
    answer_format: AnswerFormat = AnswerFormat()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Which process this is. instance id: random id of this process start, 32 hex digits."""

    role: str
    instance_id: str
    address: str

    @property
    def short(self) -> str:
        """Of the instance id: enough to tell processes apart, too little to speak to one."""
        return self.instance_id[:8]
