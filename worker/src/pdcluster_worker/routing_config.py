"""The policy of `spec.routing`: where a prompt is computed, and by which numbers."""

from typing import Annotated

import msgspec

from pdcluster_worker.config_section import Natural, PolicySection, Weight


class OffloadPolicy(PolicySection, frozen=True):
    """Numbers of the offload decision [O1]."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScorePolicy(PolicySection, frozen=True):
    """Choice among prefill workers with credit: lowest load_weight * queued tokens - prefix_weight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditPolicy(PolicySection, frozen=True):
    """How far ahead of its engine a prefill worker accepts work: tokens = batches_ahead * maxBatchedTokens."""

    batches_ahead: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)] = 2.0
