"""Units of 64 tokens follow the blocks that hold them, whatever the size of a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonlm.core.kvcache.cache_events import CachedUnits, Change, units_in
from batonlm.core.kvcache.prefix import UNIT_TOKENS, PrefixLink, prefix_hashes
from tests.core.cache_replica import hashes
from tests.core.chains import TOKENIZER, chain_of

SIZES = (16, 32, 48, 64, 96, 128, 160)
LENGTH = 480


def history(turns: tuple[int, ...]) -> list[int]:
    """LENGTH tokens; two histories part where their turns do, at positions 30, 130, 230 …"""
    return [turns[(at + 70) // 100 - 1] if at >= 30 else 0 for at in range(LENGTH)]


@pytest.mark.parametrize("size", SIZES)
def test_a_chain_names_the_units_that_tokenizers_name(size: int) -> None:
    tokens = list(range(LENGTH))
    chain = chain_of(tokens, size)
    named = [unit for link in chain.links for unit in link.units]
    full = LENGTH // size * size
    assert named == hashes(prefix_hashes(tokens[:full], b"", TOKENIZER))
    for index, link in enumerate(chain.links):
        assert link.depth == index
        assert len(link.units) == (index + 1) * size // UNIT_TOKENS - index * size // UNIT_TOKENS


@pytest.mark.parametrize("size", SIZES)
def test_a_fork_names_the_same_units(size: int) -> None:
    tokens = list(range(LENGTH))
    chain = chain_of(tokens[: LENGTH // 2], size)
    fork = chain.fork()
    for one in (chain, fork):
        one.extend(tokens, LENGTH // size)
    assert chain.links == fork.links == chain_of(tokens, size).links


histories = st.tuples(*[st.integers(1, 2)] * 5).map(history)


@given(
    size=st.sampled_from(SIZES),
    texts=st.lists(histories, min_size=1, max_size=4),
    data=st.data(),
)
def test_with_states_units_are_there_whose_ends_are_marked(
    size: int, texts: list[list[int]], data: st.DataObject
) -> None:
    """Blocks come, go and are marked in any order; only what is here can be."""
    links = {link.digest: link for text in texts for link in chain_of(text, size).links}
    here: dict[bytes, PrefixLink] = {}
    marked: set[bytes] = set()
    told: list[Change] = []
    units = CachedUnits(told.append, marked_only=True)
    heard: set[bytes] = set()
    for digest in data.draw(st.lists(st.sampled_from(sorted(links)), max_size=60)):
        told.clear()
        if digest not in here:
            here[digest] = links[digest]
            units.add(links[digest])
        elif digest not in marked:
            marked.add(digest)
            units.mark(links[digest])
        else:
            marked.remove(digest)
            units.unmark(links[digest])
            units.remove(here.pop(digest))
        for unit, came in told:
            assert (unit not in heard) is came, "told twice, or never came"
            (heard.add if came else heard.remove)(unit)
        wanted: set[bytes] = set()
        for text in texts:
            for link in chain_of(text, size).links:
                if link.digest not in here:
                    break
                whole = hashes(prefix_hashes(text[: (link.depth + 1) * size], b"", TOKENIZER))
                before = link.depth * size // UNIT_TOKENS
                wanted |= set(whole[before:][-1:] if link.digest in marked else ())
        assert heard == units.present == units_in(here.values(), marked) == wanted


@given(
    size=st.sampled_from(SIZES),
    texts=st.lists(histories, min_size=1, max_size=4),
    data=st.data(),
)
def test_units_are_there_when_all_blocks_up_to_their_end_are(
    size: int, texts: list[list[int]], data: st.DataObject
) -> None:
    """Blocks come and go in any order; the oracle looks at tokens, not at links."""
    links = {link.digest: link for text in texts for link in chain_of(text, size).links}
    here: dict[bytes, PrefixLink] = {}
    told: list[Change] = []
    units = CachedUnits(told.append)
    heard: set[bytes] = set()
    for digest in data.draw(st.lists(st.sampled_from(sorted(links)), max_size=60)):
        told.clear()
        if digest in here:
            units.remove(here.pop(digest))
        else:
            here[digest] = links[digest]
            units.add(links[digest])
        for unit, came in told:
            assert (unit not in heard) is came, "told twice, or never came"
            (heard.add if came else heard.remove)(unit)
        wanted = {unit for text in texts for unit in findable(text, size, here)}
        assert heard == units.present == units_in(here.values()) == wanted


def findable(text: list[int], size: int, here: dict[bytes, PrefixLink]) -> set[bytes]:
    """Units of a text whose blocks are all here."""
    length = 0
    for link in chain_of(text, size).links:
        if link.digest not in here:
            break
        length += size
    return set(hashes(prefix_hashes(text[:length], b"", TOKENIZER)))
