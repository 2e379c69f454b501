"""BlockPool against a model that keeps the memory's contents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batonlm.core.kvcache.block_pool import BlockPool, BlockTable, StateSnapshot
from batonlm.core.kvcache.prefix import PrefixChain
from tests.core.chains import chain_of
from tests.core.step_machine import STATES
from tests.depth import examples

SIZE = 4


@dataclass(eq=False)
class Held:
    """A live table and what memory must hold for it. written: positions that have KV."""

    table: BlockTable
    tokens: list[int]
    chain: PrefixChain
    salt: bytes
    written: int
    in_flight: int = 0


@dataclass
class Flight:
    step: int
    touched: set[int]
    wrote: list[tuple[Held, int]] = field(default_factory=list)
    made: list[tuple[Held, int, StateSnapshot]] = field(default_factory=list)
    """Copies of states, and behind how many positions."""


class PoolMachine(RuleBasedStateMachine):
    """Steps write into a model of memory; whoever reads a block must find its own tokens there."""

    @initialize(num_blocks=st.integers(4, 24), state_positions=STATES)
    def begin(self, num_blocks: int, state_positions: int) -> None:
        self.pool = BlockPool(
            num_blocks, SIZE, state_positions=state_positions, snapshot_positions=SIZE
        )
        self.state_positions = state_positions
        self.memory: dict[tuple[int, int], tuple[bytes, int, int]] = {}
        self.held: list[Held] = []
        self.flights: deque[Flight] = deque()
        self.step = 0

    def place(self, held: Held, position: int) -> tuple[int, int]:
        """(block, place in it) of a position."""
        block, offset = divmod(position, SIZE)
        return held.table.blocks[self.pool.state_blocks + block], offset

    def state_of(
        self, held: Held, end: int, blocks: Sequence[int]
    ) -> dict[tuple[int, int], tuple[bytes, int, int]]:
        """What memory must hold in these blocks of its state behind `end` positions: by (block,
        place in it)."""
        about = hash((held.salt, *held.tokens[:end]))
        return {
            (blocks[i // SIZE], i % SIZE): (b"state", i, about) for i in range(self.state_positions)
        }

    def new_blocks_are_free(self, blocks: list[int]) -> None:
        owned = {block for held in self.held for block in held.table.blocks}
        assert not owned & set(blocks), "a block has two owners"
        for flight in self.flights:
            assert not flight.touched & set(blocks), "a step in flight may still touch it"

    @rule(
        family=st.integers(0, 2),
        size=st.integers(1, 30),
        salt=st.sampled_from([b"", b"a"]),
        room=st.integers(0, 5),
        computes=st.booleans(),
    )
    def allocate(self, family: int, size: int, salt: bytes, room: int, computes: bool) -> None:
        tokens = [family * 100 + i for i in range(size)]
        chain = chain_of(tokens, SIZE, salt)
        wanted = self.pool.blocks_for(size)
        free = self.pool.num_free
        table = self.pool.allocate(
            wanted, chain, (size - 1) // SIZE, room=room, computes=size * computes
        )
        if table is None:
            assert wanted > free == self.pool.num_free
            return
        state = self.pool.state_blocks
        self.new_blocks_are_free(table.blocks[:state] + table.blocks[state + table.num_cached :])
        assert table.num_cached <= table.num_known <= (size - 1) // SIZE
        held = Held(table, tokens, chain, salt, table.num_cached * SIZE)
        if computes:
            assert bool(table.copies) == bool(table.num_cached and state)
        else:
            assert not table.copies and table.num_cached == table.num_known
            # A hand-over brings it.
            self.memory |= self.state_of(held, held.written, table.blocks)
        self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.held))
        if parent.written == 0 or parent.table.copies:
            return
        position, wanted = parent.written, self.pool.blocks_for(parent.written + 1)
        free = self.pool.num_free
        table = self.pool.fork(parent.table, position, wanted, data.draw(st.integers(0, 5)))
        if table is None:
            assert wanted - position // SIZE > free == self.pool.num_free
            return
        state = self.pool.state_blocks
        self.new_blocks_are_free([*table.blocks[:state], *table.blocks[state + position // SIZE :]])
        tokens, chain = (
            parent.tokens[:position],
            chain_of(parent.tokens[:position], SIZE, parent.salt),
        )
        self.held.append(Held(table, tokens, chain, parent.salt, position))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 2))
    def append(self, data: st.DataObject, token: int) -> None:
        held = data.draw(st.sampled_from(self.held))
        if len(held.tokens) == self.pool.room(held.table):
            free = self.pool.num_free
            if not self.pool.grow(held.table):
                assert free == 0
                return
            block = held.table.blocks[-1]
            others = [h for h in self.held if h is not held]
            assert all(block not in h.table.blocks for h in others)
            assert all(block not in flight.touched for flight in self.flights)
        held.tokens.append(1000 + token)

    @rule()
    def launch(self) -> None:
        copies = [copy for held in self.held for copy in self.pool.claim_copies(held.table)]
        for copy in copies:
            for offset in range(copy.num_positions):
                self.memory[copy.target, offset] = self.memory[copy.source, offset]
        self.step += 1
        touched = {block for held in self.held for block in held.table.blocks}
        flight = Flight(self.step, touched | {copy.source for copy in copies})
        for held in self.held:
            first, last = held.written // SIZE, len(held.tokens) // SIZE
            for end in ({first + 1, last} if last > first else ()) if self.state_positions else ():
                if (made := self.pool.snapshot()) is not None:
                    self.new_blocks_are_free([*made.blocks])
                    flight.made.append((held, end * SIZE, made))
                    self.memory |= self.state_of(held, end * SIZE, made.blocks)
                    flight.touched.update(made.blocks)
        for held in self.held:
            for position in range(held.written, len(held.tokens)):
                written = (held.salt, position, held.tokens[position])
                self.memory[self.place(held, position)] = written
            held.written = len(held.tokens)
            held.in_flight += 1
            flight.wrote.append((held, held.written))
            self.memory |= self.state_of(held, held.written, held.table.blocks)
        self.pool.launched(self.step)
        self.flights.append(flight)

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self) -> None:
        flight = self.flights.popleft()
        self.pool.completed(flight.step)
        for held, written in flight.wrote:
            if held in self.held:
                held.chain.extend(held.tokens, written // SIZE)
                self.pool.publish(held.table, held.chain, written // SIZE)
        for held, end, made in flight.made:
            if held in self.held:
                self.pool.keep(made, held.chain.links[end // SIZE - 1])
            else:
                self.pool.drop_snapshot(made)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        self.pool.release(held.table)

    @invariant()
    def memory_holds_what_tables_say(self) -> None:
        for held in self.held:
            safe = held.written
            if held.table.copies:
                safe = safe // SIZE * SIZE
            for position in range(safe):
                found = self.memory[self.place(held, position)]
                assert found == (held.salt, position, held.tokens[position])
            if held.written and not held.table.copies:
                state = self.state_of(held, held.written, held.table.blocks)
                assert state.items() <= self.memory.items()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_tables == len(self.held)
        owned = {block for held in self.held for block in held.table.blocks}
        assert owned.isdisjoint(
            block for f in self.flights for *_, m in f.made for block in m.blocks
        )
        if not self.flights and not any(held.table.copies for held in self.held):
            assert self.pool.num_free == self.pool.num_blocks - len(owned)

    def teardown(self) -> None:
        for held in self.held:
            self.pool.release(held.table)
        for flight in self.flights:
            self.pool.completed(flight.step)
            for *_, made in flight.made:
                self.pool.drop_snapshot(made)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(
    max_examples=examples(80), stateful_step_count=40, derandomize=True
)
TestPool = PoolMachine.TestCase
