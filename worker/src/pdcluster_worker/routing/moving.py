"""Which request that has begun may go on at another decode worker, and at which one [O8].

A move is a new leg of the same choice: its prompt and what it has made so far go to the next
worker apart, so limits, penalties and draws go on by position.  Pure; what has happened to a
worker is seen in `dispatch.course`.
"""

from typing import Literal

from pdcluster_worker.moving_config import MovingPolicy

MoveReason = Literal["lost", "stalled", "draining"]
"""What is the matter with the worker that a request runs on."""

MoveOutcome = Literal["moved", "nowhere", "refused"]
"""Another worker made the next token; none takes it; the policy does not allow it."""


def may_move(policy: MovingPolicy, num_moves: int) -> bool:
    """Whether a choice that has moved so often may do so once more.

    >>> may_move(MovingPolicy(), 1), may_move(MovingPolicy(), 2)
    (True, False)
    """
    return policy.enabled and num_moves < policy.max_moves


def leg_id(request_id: str, num_legs: int) -> str:
    """The id of a choice's leg after so many others: each is another request to a worker.

    Blocks of one leg are never taken for those of the next, also where both run on one worker.

    >>> leg_id("r", 0), leg_id("r", 2)
    ('r', 'r~2')
    """
    return f"{request_id}~{num_legs}" if num_legs else request_id
