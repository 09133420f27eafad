"""The policy of `spec.routing.moving` and `racing`: requests that run on another
worker, or on two.
"""

from typing import Annotated

import msgspec

from pdcluster_worker.config.section import Natural, PolicySection, Share

Moves = Annotated[int, msgspec.Meta(ge=1, le=16)]


class MovingPolicy(PolicySection, frozen=True):
    """Policy of moving a request that has begun to another decode worker.

    enabled:   it moves when its worker is lost, stalls or drains; otherwise it ends in an
               error, or holds the drain.
    after_preemptions: a request that its worker preempted so often moves to one with room for it;
               0 = none does.
    max_moves: of one choice of a request; so one that ends whatever runs it ends few workers.
    """

    enabled: bool = True
    max_moves: Moves = 2
    after_preemptions: Natural = 0


class RacingPolicy(PolicySection, frozen=True):
    """Policy of racing a request on two decode workers until one has made its first token.

    max_requests: most requests on either, waiting or running.
    max_ratio:    of all requests, that race at most.
    """

    enabled: bool = False
    max_requests: Natural = 2
    max_ratio: Share = 0.1
