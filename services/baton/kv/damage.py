"""Ways to damage a parcel, in its slot or in what is told of it; decides nothing about when.

Every function returns whether it changed anything: what changed nothing is no fault.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from dataclasses import replace

from baton.core.handover_messages import ParcelHeader, ParcelReady
from baton.kv.fault_spec import Kind
from baton.kv.parcel import HEADER_BYTES

# Where fields of the binary header lie; see baton.kv.parcel.
_INCARNATION, _LAYOUT, _LENGTH = slice(8, 24), slice(68, 76), slice(76, 84)

KEPT = 8


class Damage:
    """Damages parcels of one giver or collector. Keeps a few old ones, to bring them back."""

    def __init__(self) -> None:
        self._parcels: deque[bytes] = deque(maxlen=KEPT)
        self._headers: deque[ParcelHeader] = deque(maxlen=KEPT)

    def keep(self, parcel: memoryview) -> None:
        self._parcels.append(bytes(parcel))

    def keep_told(self, told: ParcelReady) -> None:
        self._headers.append(told.header)

    def in_slot(self, kind: Kind, part: str, parcel: memoryview, draw: random.Random) -> bool:
        """parcel: header and payload as they lie in a slot."""
        before = bytes(parcel)
        match kind:
            case Kind.CORRUPT:
                _flip(parcel, _part(part, parcel), draw)
            case Kind.STALE:
                parcel[_INCARNATION] = draw.randbytes(16)
            case Kind.LAYOUT:
                parcel[_LAYOUT] = draw.randbytes(8)
            case Kind.LENGTH:
                length = int.from_bytes(parcel[_LENGTH], "little")
                parcel[_LENGTH] = draw.randrange(1, length).to_bytes(8, "little")
            case Kind.REPLAY if self._parcels:
                old = draw.choice(self._parcels)
                where = _part(part, parcel)
                where = slice(where.start, min(where.stop, len(old)))
                parcel[where] = old[where]
            case _:
                return False
        return bytes(parcel) != before

    def told(self, kind: Kind, told: ParcelReady, draw: random.Random) -> ParcelReady:
        """The announcement of a parcel, changed, or as it was when there is nothing to change to.

        Another hand-over's parcel comes back with the slot of this one.
        """
        header = told.header
        match kind:
            case Kind.STALE:
                header = replace(header, incarnation=secrets.token_hex(16))
            case Kind.LAYOUT:
                header = replace(header, num_heads=header.num_heads + draw.randrange(1, 8))
            case Kind.LENGTH:
                header = replace(header, payload_bytes=draw.randrange(1, header.payload_bytes))
            case Kind.REPLAY if self._headers:
                header = draw.choice(self._headers)
        return replace(told, header=header)


def _part(part: str, parcel: memoryview) -> slice:
    return {
        "header": slice(0, HEADER_BYTES),
        "payload": slice(HEADER_BYTES, len(parcel)),
    }.get(part, slice(0, len(parcel)))


def _flip(parcel: memoryview, where: slice, draw: random.Random) -> None:
    """One bit."""
    parcel[draw.randrange(where.start, where.stop)] ^= 1 << draw.randrange(8)
