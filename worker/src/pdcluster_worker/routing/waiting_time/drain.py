"""When requests end that an engine serves a bounded number of at a time, one token each a step.

All running requests make tokens at the same rate, so who ends when is found in
tokens first, and turned into seconds by the batch of each stretch after.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush


def drain(
    running: Sequence[float],
    waiting: Sequence[float],
    seats: int,
    token_seconds: Callable[[float], float],
) -> list[tuple[float, float]]:
    """(start, end) in seconds from now of each request, running ones first, in the order given.

    running, waiting: output tokens that each still has; those that wait take a seat in that order when one is free.
    token_seconds:    of one token in a batch of that size.

    >>> drain([2.0], [3.0, 1.0], 2, lambda batch: batch)
    [(0.0, 4.0), (0.0, 6.0), (4.0, 6.0)]
    """
    spans = [(0.0, 0.0)] * (len(running) + len(waiting))
    seated: list[tuple[float, int]] = []
    for index, tokens in enumerate(running):
        heappush(seated, (tokens, index))
    queue = list(enumerate(waiting, start=len(running)))[::-1]
    position = now = 0.0
    while seated or queue:
        while queue and len(seated) < max(1, seats):
            index, tokens = queue.pop()
            spans[index] = (now, now)
            heappush(seated, (position + tokens, index))
        end, index = heappop(seated)
        now += (end - position) * token_seconds(len(seated) + 1)
        position = end
        spans[index] = (spans[index][0], now)
    return spans
