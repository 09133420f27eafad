"""Placement of the choices of one prompt (parallel branches) once a worker, home, has its KV.

A worker that takes some of them reads the prompt's KV from home, once for all of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Literal

MIN_ANSWER_TOKENS = 64
"""Shorter answers are complete soon after the KV of their prompt would have moved."""

TOKENS_A_STEP = 16
"""KV of so many prompt tokens is taken to move in the time of a decode step: an assumption."""

_HOP = 0.5  # of a request: a branch leaves home only for a worker with fewer of them

Reason = Literal["bound", "alone", "short_answer", "idle", "not_worth_it", "spread"]
"""bound: its request keeps them on one worker."""


@dataclass(frozen=True, slots=True)
class BranchWorker:
    """num_requests: without the branches to place.  lacking_tokens: of the prompt, 0 at home."""

    key: str
    num_requests: int
    free_blocks: int
    lacking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BranchSize:
    """Branches to place, and the tokens that each is expected to make."""

    num_branches: int
    answer_tokens: int
    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def answer_blocks(self) -> int:
        return self.num_blocks(self.answer_tokens) + 1  # the prompt's last block is copied

    def capacity(self, worker: BranchWorker) -> int:
        """Branches that it has blocks for; as with moves, half of its blocks are left to others."""
        free = worker.free_blocks // 2 - self.num_blocks(worker.lacking_tokens)
        return max(0, free // self.answer_blocks)


@dataclass(frozen=True, slots=True)
class BranchPlacement:
    """counts: branches by worker, without those that stay at home."""

    counts: dict[str, int]
    reason: Reason


def place_branches(
    home: BranchWorker, others: Sequence[BranchWorker], size: BranchSize, busy_requests: int
) -> BranchPlacement:
    """Even out the requests of the workers, as far as that pays.

    busy_requests: with fewer, branches included, home keeps all that it has blocks for.

    >>> home, others = BranchWorker("a", 1, 999), [BranchWorker(key, 0, 999, 128) for key in "bc"]
    >>> place_branches(home, others, BranchSize(7, 200, 16), busy_requests=8).counts
    {'b': 3, 'c': 2}
    >>> place_branches(home, others, BranchSize(6, 200, 16), busy_requests=8).reason
    'idle'
    """
    if not others:
        return BranchPlacement({}, "alone")
    if size.answer_tokens < MIN_ANSWER_TOKENS:
        return BranchPlacement({}, "short_answer")
    has_blocks = size.answer_blocks * size.num_branches <= home.free_blocks
    if home.num_requests + size.num_branches < busy_requests and has_blocks:
        return BranchPlacement({}, "idle")
    targets = _able_to_pay(others, size)
    while counts := _evened_out(home, targets, size):
        unpaid = [each for each in targets if not _pays(each, counts[each.key], size)]
        if not unpaid:
            return BranchPlacement(dict(counts), "spread")
        # Without those that take the fewest the others take more.  Several at a time: there may be
        # hundreds of workers.
        unpaid.sort(key=lambda each: counts[each.key])
        left_out = {each.key for each in unpaid[: max(1, len(unpaid) // 2)]}
        targets = [each for each in targets if each.key not in left_out]
    return BranchPlacement({}, "not_worth_it")


def _able_to_pay(others: Sequence[BranchWorker], size: BranchSize) -> list[BranchWorker]:
    """Workers that a placement may use: of those that pay only with several branches, the least
    busy ones, as many as there are branches for.
    """
    step = TOKENS_A_STEP * size.answer_tokens
    least = {each.key: max(1, -(-each.lacking_tokens // step)) for each in others}
    able = [
        each for each in others if least[each.key] <= min(size.num_branches, size.capacity(each))
    ]
    several = [each for each in able if least[each.key] > 1]
    several.sort(key=lambda each: each.num_requests + least[each.key])
    left_out = {each.key for each in several[size.num_branches // 2 :]}
    return [each for each in able if each.key not in left_out]


def _pays(worker: BranchWorker, num_branches: int, size: BranchSize) -> bool:
    steps = num_branches * size.answer_tokens
    return not num_branches or worker.lacking_tokens <= TOKENS_A_STEP * steps


def _evened_out(
    home: BranchWorker, targets: Sequence[BranchWorker], size: BranchSize
) -> Counter[str]:
    """Give each branch to the worker with the fewest requests; of equals home, then the first.

    Home takes more than it has blocks for only when no other worker has any.
    """
    counts: Counter[str] = Counter()
    left = [size.capacity(worker) for worker in targets]
    able = [(worker.num_requests, i) for i, worker in enumerate(targets) if left[i]]
    heapify(able)
    num_home, home_left = home.num_requests, home.free_blocks // size.answer_blocks
    for _ in range(size.num_branches):
        num_best, best = able[0] if able else (num_home, 0)
        if not able or (num_best + _HOP > num_home and home_left > 0):
            num_home, home_left = num_home + 1, home_left - 1
            continue
        counts[targets[best].key] += 1
        left[best] -= 1
        if left[best]:
            heapreplace(able, (num_best + 1, best))
        else:
            heappop(able)
    return counts
