"""Lengths of answers, and an engine simulated with them."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import sqrt

BEYOND = 0.5  # share of its length that the longest answer so far is taken to go on for


@dataclass(frozen=True, slots=True)
class Survival:
    """S(t): the share of answers longer than t tokens, a step function."""

    ends: tuple[int, ...]  # lengths at which it falls, ascending
    share: tuple[float, ...]  # S from there on; the last is 0
    beyond: tuple[float, ...]  # mean tokens by which answers exceed ends[i], times share[i]

    @classmethod
    def of(
        cls, completed: Iterable[tuple[int, float]], running: Iterable[tuple[int, float]] = ()
    ) -> "Survival":
        """From (tokens, weight) pairs; at least one completed, else ValueError."""
        # tokens: weight that ended there, weight that left there
        events: dict[int, list[float]] = {}
        for index, pairs in enumerate((completed, running)):
            for tokens, weight in pairs:
                event = events.setdefault(tokens, [0.0, 0.0])
                event[0] += 0.0 if index else weight
                event[1] += weight
        at_risk = sum(weight for _, weight in events.values())
        ends, share, left = [], [], 1.0
        for tokens in sorted(events):
            ended, gone = events[tokens]
            if ended:
                left *= max(0.0, 1.0 - ended / at_risk)
                ends.append(tokens)
                share.append(left)
            at_risk -= gone
        if not ends:
            raise ValueError("no answer has ended: ask with at least one completed length")
        share[-1] = 0.0
        return cls(tuple(ends), tuple(share), tuple(_areas(ends, share)))

    def mean_beyond(self, tokens: int) -> float:
        """Mean tokens that an answer of already `tokens` still has; at least 1."""
        index = bisect_right(self.ends, tokens)
        if index == len(self.ends):
            return max(1.0, BEYOND * tokens)
        left = self.share[index - 1] if index else 1.0
        area = left * (self.ends[index] - tokens) + self.beyond[index]
        return max(1.0, area / left)

    @property
    def mean(self) -> float:
        return self.mean_beyond(0)

    def quantile_beyond(self, tokens: int, rank: float) -> float:
        """The same at a rank in [0, 1) of the answers so long; at least 1."""
        index = bisect_right(self.ends, tokens)
        if index == len(self.ends):
            return max(1.0, BEYOND * tokens)
        left = self.share[index - 1] if index else 1.0
        while self.share[index] > left * (1.0 - rank):
            index += 1
        return max(1.0, float(self.ends[index] - tokens))


def _areas(ends: list[int], share: list[float]) -> list[float]:
    areas = [0.0]
    for index in range(len(ends) - 1, 0, -1):
        areas.append(areas[-1] + share[index - 1] * (ends[index] - ends[index - 1]))
    return areas[::-1]


LEAST, MOST = 0.1, 200.0  # bounds of the weight

UNKNOWN = 1.0  # until two groups can be compared


def shared_weight(groups: Iterable[Sequence[int]]) -> float:
    """groups: lengths of answers by group; UNKNOWN with fewer than two groups of two answers.

    >>> [round(shared_weight(groups), 1) for groups in ([[1, 99, 50], [3, 97, 51]], [[10, 11, 12],
    ...     [90, 91, 92]], [[5, 6]])]
    [2.1, 0.1, 1.0]
    """
    known = [lengths for lengths in groups if len(lengths) > 1]
    if len(known) < 2:
        return UNKNOWN
    sizes, means = (
        [len(lengths) for lengths in known],
        [sum(lengths) / len(lengths) for lengths in known],
    )
    total, num_free = sum(sizes), len(known) - 1
    within = sum(
        (length - mean) ** 2
        for lengths, mean in zip(known, means, strict=True)
        for length in lengths
    ) / (total - len(known))
    grand = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / total
    between = (
        sum(size * (mean - grand) ** 2 for size, mean in zip(sizes, means, strict=True)) / num_free
    )
    typical_size = (total - sum(size * size for size in sizes) / total) / num_free
    doubt = within / typical_size * sqrt(2 / num_free)
    of_means = max(0.0, between - within) / typical_size + doubt
    return MOST if of_means <= 0 else min(MOST, max(LEAST, within / of_means))


def simulate_queue(
    running: Sequence[float],
    waiting: Sequence[float],
    slots: int,
    token_seconds: Callable[[float], float],
) -> list[tuple[float, float]]:
    """(start, end) in seconds from now of each request, running ones first, in the order given.

    running, waiting: output tokens that each still has.
    token_seconds:    of one token in a batch of that size.

    >>> simulate_queue([2.0], [3.0, 1.0], 2, lambda batch: batch)
    [(0.0, 4.0), (0.0, 6.0), (4.0, 6.0)]
    """
    paces: dict[int, float] = {}
    spans = [(0.0, 0.0)] * (len(running) + len(waiting))
    in_slots: list[tuple[float, int]] = []
    for index, tokens in enumerate(running):
        heappush(in_slots, (tokens, index))
    queue = list(enumerate(waiting, start=len(running)))[::-1]
    position = now = 0.0
    while in_slots or queue:
        while queue and len(in_slots) < max(1, slots):
            index, tokens = queue.pop()
            spans[index] = (now, now)
            heappush(in_slots, (position + tokens, index))
        end, index = heappop(in_slots)
        batch = len(in_slots) + 1
        if batch not in paces:
            paces[batch] = token_seconds(batch)
        now += (end - position) * paces[batch]
        position = end
        spans[index] = (spans[index][0], now)
    return spans


def simulate_behind(
    running: Sequence[float],
    ahead: tuple[int, float],
    tokens: float,
    slots: int,
    token_seconds: Callable[[float], float],
) -> tuple[float, float]:
    """(start, end) of a request behind `ahead` = (number, tokens of each) equal ones.

    The cost does not grow with the number: equal rounds take equal time and are only counted.

    >>> simulate_behind([4.0, 1.0], (7, 3.0), 2.0, 2, lambda batch: batch)
    (26.0, 28.0)
    """
    number, each = ahead
    slots = max(1, slots)
    rounds = max(0, number // slots - 2)
    start, end = simulate_queue(
        running, [*((number - rounds * slots) * [each]), tokens], slots, token_seconds
    )[-1]
    counted = rounds * each * token_seconds(slots)
    return start + counted, end + counted
