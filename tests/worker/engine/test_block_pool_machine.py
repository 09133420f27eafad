"""BlockPool beside a naive model of [V16] and the five states: one queue of blocks to take.

The model keeps one list of blocks without holders, next to be taken first.  A
release goes through its blocks last to first and puts those without a hash at
the front, hashed ones at the end.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.messages import engine as m
from pdcluster_worker.routing.prefix_index import PrefixIndex

NUM_BLOCKS = 8
HASHES = [bytes([65 + number]) for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.queue = list(range(NUM_BLOCKS))  # next to be taken first
        self.hashes: dict[int, bytes] = {}
        self.tables: list[list[int]] = []  # what each holder holds, in order
        self.receiving: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.num_evictions = 0
        self.index = PrefixIndex()  # fed by the events alone

    def _take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        self.num_evictions += sum(block in self.hashes for block in taken)
        for block in taken:
            self.hashes.pop(block, None)
        return taken

    @rule(count=st.integers(1, 4))
    def allocate(self, count):
        if count <= self.pool.num_available:
            expected = self._take(count)
            assert self.pool.allocate(count) == expected
            self.tables.append(expected)

    @rule(hashes=st.lists(st.sampled_from(HASHES), min_size=1, max_size=3))
    def hit(self, hashes):
        """[V16]: a hit is held once more, and is no longer in the queue."""
        known = {block_hash: block for block, block_hash in self.hashes.items()}
        expected: list[int] = []
        for block_hash in hashes:
            if block_hash not in known or known[block_hash] in expected:
                break
            expected.append(known[block_hash])
        found = self.pool.prefix_cache.match(hashes[: len(expected) + 1], len(expected))
        assert found == expected
        if found:
            self.pool.acquire(found)
            self.tables.append(found)
            self.queue = [block for block in self.queue if block not in found]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def cache(self, data, block_hash):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if block not in self.hashes:
            self.pool.cache(block, block_hash)
            if block_hash not in self.hashes.values():
                self.hashes[block] = block_hash

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {block for other in self.tables for block in other}
        for block in reversed(table):
            if block in held:
                continue
            if block in self.hashes:
                self.queue.append(block)
            else:
                self.queue.insert(0, block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def receive(self, data):
        number = data.draw(st.integers(0, len(self.tables) - 1))
        others = {
            block for index, table in enumerate(self.tables) if index != number for block in table
        }
        if not any(block in self.hashes or block in others for block in self.tables[number]):
            self.receiving.append(self.tables.pop(number))
            self.pool.start_receiving(self.receiving[-1])

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), whole=st.booleans())
    def end_receiving(self, data, whole):
        blocks = self.receiving.pop(data.draw(st.integers(0, len(self.receiving) - 1)))
        (self.pool.finish_receiving if whole else self.pool.quarantine)(blocks)
        (self.tables if whole else self.quarantined).append(blocks)

    @precondition(lambda self: self.quarantined)
    @rule()
    def fence(self):
        blocks = self.quarantined.pop()
        self.pool.release_quarantined(blocks)
        self.queue[:0] = blocks

    @rule()
    def report(self):
        """[V19]: an index that follows the events knows what the pool knows."""
        events = self.pool.prefix_cache.take_events() or m.BlockEvents([], [], 0)
        self._follow(events)
        assert self.index.hashes("here") == set(self.hashes.values())

    @rule()
    def miss(self):
        """[V19]: events that never arrive; the next ones show it, and a snapshot follows."""
        if self.pool.prefix_cache.take_events() is None:
            return
        self.pool.prefix_cache.begin_snapshot()

    def _follow(self, events: m.BlockEvents) -> None:
        if events.is_cleared:
            self.index.snapshot("here", events.stored)
        else:
            self.index.apply("here", events.stored, events.removed)

    @invariant()
    def agrees_with_the_model(self):
        pool, held = self.pool, [block for table in self.tables for block in table]
        pool.check()
        assert pool.num_available == len(self.queue)
        assert pool.num_evictions == self.num_evictions
        for block in range(NUM_BLOCKS):
            assert (block in pool.prefix_cache) == (block in self.hashes)
            assert (pool.state(block) is BlockState.IN_USE) == (block in held)
            if block in held:
                assert pool.ref_count(block) == held.count(block)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
