"""Policies of `spec.routing.moving` (migration) and `racing` (hedged requests)."""

from typing import Annotated

import msgspec

from pdcluster_worker.config.section import Natural, PolicySection, Share

Moves = Annotated[int, msgspec.Meta(ge=1, le=16)]


class MovingPolicy(PolicySection, frozen=True):
    """Migration of running requests to another decode worker.

    enabled:           migrate when the worker is lost, stalls or drains.
    max_moves:         per choice; bounds the workers that a harmful request can end.
    after_preemptions: migrate a request that was preempted so often; 0 = never.
    """

    enabled: bool = True
    max_moves: Moves = 2
    after_preemptions: Natural = 0


class RacingPolicy(PolicySection, frozen=True):
    """Hedged requests: run on two decode workers until the first token.

    max_requests: most requests on either worker.
    max_ratio:    of all requests.
    """

    enabled: bool = False
    max_requests: Natural = 2
    max_ratio: Share = 0.1
