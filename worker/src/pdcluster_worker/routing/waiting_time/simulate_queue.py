"""Simulate an engine that decodes at most `slots` requests at a time, each one token a step."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush


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
