"""Decodes that go on unchanged: their tokens and blocks are counted, and no step is looked at.

All of them get one token in each step, so a request is known by the step that ends it, and by the
residue of the steps that take a block for it.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import sqrt

from pdcluster_simulator.requests import EngineWork
from pdcluster_worker.engine.block_table import BlockTables


@dataclass(frozen=True, slots=True)
class DecodePace:
    """Seconds of steps of one batch: of the first, and by how much each is longer than the one
    before, whose contexts are shorter by a token.
    """

    first: float
    more: float

    def seconds(self, num_steps: int) -> float:
        return num_steps * self.first + self.more * num_steps * (num_steps - 1) / 2

    def num_steps(self, seconds: float) -> int:
        """Steps that have ended after so many seconds."""
        seconds += 1e-12 + 1e-9 * self.first  # a sum may be a little less than its parts
        linear = self.first - self.more / 2
        if self.more <= 1e-9 * self.first:
            return int(seconds / self.first)
        return int((sqrt(linear * linear + 2 * self.more * seconds) - linear) / self.more)


class DecodeBatch:
    """step: number of steps so far; context: tokens of all requests.

    grows: a request takes a block when its last one is full; else it has all that it will need
    """

    def __init__(self, tables: BlockTables, block_size: int, *, grows: bool) -> None:
        self.step = 0
        self.context = 0
        self.requests: dict[EngineWork, None] = {}
        self._grows = grows
        self._tables = tables
        self._block_size = block_size
        self._by_residue = [0] * block_size
        # Blocks that are taken and in no block table; so many of them are for steps to come.
        self._spare: list[int] = []
        self._num_ahead = 0
        self._ends: list[tuple[int, int, EngineWork]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self.requests)

    def join(self, request: EngineWork, num_left: int) -> None:
        """num_left: tokens that it gets, one in each step from the next on; at least one."""
        size, length = self._block_size, len(request.tokens)
        request.synced_step, request.finish_step = self.step, self.step + num_left
        if self._grows:
            request.residue = (self.step + 2 - length) % size
            self._by_residue[request.residue] += 1
            # A block for its next token is counted when that comes.
            for _ in range(len(request.block_table) - -(-(length - 1) // size)):
                self._spare.append(request.block_table.pop())
                self._num_ahead += 1
        self.requests[request] = None
        self.context += length
        heappush(self._ends, (request.finish_step, next(self._numbers), request))

    @property
    def num_steps_left(self) -> int:
        """Steps until the next request ends; there is one at least."""
        ends = self._ends
        while ends[0][2].finish_step != ends[0][0] or ends[0][2] not in self.requests:
            heappop(ends)
        return ends[0][0] - self.step

    def num_blocks(self, num_steps: int) -> int:
        """Blocks that so many steps take for all requests together."""
        if not self._grows:
            return 0
        size, by_residue, first = self._block_size, self._by_residue, self.step + 1
        whole, rest = divmod(num_steps, size)
        found = whole * len(self.requests)
        for number in range(first, first + rest):
            found += by_residue[number % size]
        return found

    def num_possible(self, num_steps: int) -> int:
        """The most steps, up to so many, that find blocks."""
        available = self._tables.pool.num_available + self._num_ahead
        if self.num_blocks(num_steps) <= available:
            return num_steps
        low, high = 0, num_steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.num_blocks(middle) <= available else (low, middle)
        return low

    def advance(self, num_steps: int) -> None:
        """So many steps have ended.  Takes the blocks that they needed."""
        taken = self.num_blocks(num_steps)
        used = min(taken, self._num_ahead)
        self._num_ahead -= used
        self._spare += self._tables.pool.allocate(taken - used)
        self.step += num_steps
        self.context += num_steps * len(self.requests)

    def ended(self) -> list[EngineWork]:
        """Requests whose last token was made; they have left, with their blocks in their tables."""
        found, ends = [], self._ends
        while ends and ends[0][0] <= self.step:
            end, _, request = heappop(ends)
            if request.finish_step == end and request in self.requests:
                self.leave(request)
                found.append(request)
        return found

    def leave(self, request: EngineWork) -> None:
        self.sync(request)
        del self.requests[request]
        if self._grows:
            self._by_residue[request.residue] -= 1
        self.context -= len(request.tokens)
        request.finish_step = -1

    def sync(self, request: EngineWork) -> None:
        """Give a request the tokens and the blocks of the steps since it was last looked at."""
        num_steps = self.step - request.synced_step
        if not num_steps:
            return
        request.synced_step = self.step
        request.add_tokens(num_steps)
        missing = -(-(len(request.tokens) - 1) // self._block_size) - len(request.block_table)
        if missing > 0:
            request.block_table += self._spare[-missing:]
            del self._spare[-missing:]
        self._tables.advance(request, num_steps)

    def sync_all(self) -> None:
        """Before a step of the scheduler, which looks at each request and gives it its block."""
        for request in self.requests:
            self.sync(request)
        self._tables.pool.release(self._spare)
        self._spare, self._num_ahead = [], 0

    def stepped(self) -> None:
        """A step of the scheduler has given each request a token."""
        self.step += 1
        self.context += len(self.requests)
        for request in self.requests:
            request.synced_step = self.step
