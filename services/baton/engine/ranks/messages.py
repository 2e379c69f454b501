"""What a ranked runner and its ranks say to each other, as plain values.

Encoded with msgspec, field types checked on arrival: no pickle, whatever carries the bytes.
"""

from __future__ import annotations

import msgspec

from baton.core.kvcache.block_pool import Extents
from baton.core.request.model import KvLayout, ModelDescription
from baton.core.scheduler.plan import StepPlan, StepResult
from baton.engine.config import EngineConfig
from baton.engine.ranks.shared import SharedPlace


class Open(msgspec.Struct, frozen=True, tag=True):
    """Load your part. Sizes of memory in `config` are already a rank's share."""

    config: EngineConfig


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Write your heads' KV of the positions into the payload at `place`."""

    extents: Extents
    first_position: int
    count: int
    place: SharedPlace


class Unpack(msgspec.Struct, frozen=True, tag=True):
    """The inverse: read your heads' KV out of the payload at `place`."""

    extents: Extents
    first_position: int
    count: int
    place: SharedPlace


class Opened(msgspec.Struct, frozen=True, tag=True):
    """layout: of the rank's own heads."""

    model: ModelDescription
    layout: KvLayout
    num_blocks: int
    not_exact_because: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True):
    """field: what the operator has to change; "" for a fault of ours."""

    message: str
    field: str = ""


Request = Open | Step | Pack | Unpack
Answer = Opened | Stepped | Done | Refused

# A plan's sequences of tokens may be of any kind that can be read like a tuple.
_encoder = msgspec.msgpack.Encoder(enc_hook=list)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def to_request(data: bytes) -> Request:
    return _requests.decode(data)


def to_answer(data: bytes) -> Answer:
    return _answers.decode(data)
