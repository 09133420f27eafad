"""Policies of `spec.routing.moving` (migration) and `racing` (hedged requests)."""

from typing import Annotated

import msgspec

from pdcluster_worker.config.section import Natural, PolicySection, Share

Moves = Annotated[int, msgspec.Meta(ge=1, le=16)]


class MovingPolicy(PolicySection, frozen=True):
    """Migration of running requests to another decode worker."""

    enabled: bool = True
    max_moves: Moves = 2  # bounds the workers that a harmful request can end
    after_preemptions: Natural = 0  # 0 = never


class RacingPolicy(PolicySection, frozen=True):
    """Hedged requests: run on two decode workers until the first token."""

    enabled: bool = False
    max_requests: Natural = 2  # on either worker
    max_ratio: Share = 0.1  # of all requests
