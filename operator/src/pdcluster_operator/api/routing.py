"""`spec.routing`: where a request's prefill runs, and by which numbers."""

from typing import Annotated

from pydantic import Field

from pdcluster_operator.api.section import Section
from pdcluster_operator.api.values import Natural, Weight


class OffloadSpec(Section):
    """Numbers of the offload decision [O1]: uncached prompt tokens, requests in the prefill queue, running decodes."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScoreSpec(Section):
    """Choice among prefill workers with credit: lowest loadWeight * queued tokens - prefixWeight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditsSpec(Section):
    """How far ahead of its engine a prefill worker accepts work: batchesAhead * maxBatchedTokens tokens."""

    batches_ahead: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0


class MovingSpec(Section):
    """When a request that has begun goes on at another decode worker.

    enabled:   it moves when its worker is lost, stands still or drains
    max_moves: of one choice of a request
    """

    enabled: bool = True
    max_moves: Annotated[int, Field(ge=1, le=16)] = 2


class RoutingSpec(Section):
    """Policy: where a request's prefill runs; takes effect without a restart."""

    offload: OffloadSpec = OffloadSpec()
    prefill_score: PrefillScoreSpec = PrefillScoreSpec()
    credits: CreditsSpec = CreditsSpec()
    moving: MovingSpec = MovingSpec()
