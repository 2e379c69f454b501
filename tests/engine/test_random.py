"""The generator against its published vectors, and the shape of what it draws."""

from __future__ import annotations

import pytest

from batonlm.engine.sampler_rows import Words2, Words4, philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        # kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: Words4, key: Words2, wanted: Words4) -> None:
    assert philox4x32(counter, key) == wanted


def test_numbers_are_uniform_and_in_range() -> None:
    numbers = [uniform(42, choice, position) for choice in range(4) for position in range(2500)]
    assert all(0 <= number < 1 for number in numbers)
    counts = [0] * 20
    for number in numbers:
        counts[int(number * 20)] += 1
    chi_square = sum((count - 500) ** 2 / 500 for count in counts)
    assert chi_square < 43.8  # 0.1 % of uniform samples exceed this at 19 degrees of freedom


def test_each_part_of_the_key_counts() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (1 << 33, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 0, 0)]
    assert len({uniform(*key) for key in keys}) == len(keys)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
