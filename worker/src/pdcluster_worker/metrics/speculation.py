"""Drafted tokens, by position among the drafts of a request in one step, from 0.

Their share that was right is the quotient.
"""

from pdcluster_worker.config.speculation import MOST_DRAFTS
from pdcluster_worker.metrics.registering import Registering


class SpeculationMetrics(Registering):
    """Drafts that were verified, right, and given out."""

    def __init__(self) -> None:
        super().__init__()
        self.spec_decode_draft_tokens = self._counter(
            "spec_decode_draft_tokens", "drafted tokens that were verified", "position"
        )
        self.spec_decode_accepted_tokens = self._counter(
            "spec_decode_accepted_tokens", "drafted tokens that were right", "position"
        )
        self.spec_decode_emitted_tokens = self._histogram(
            "spec_decode_emitted_tokens",
            "tokens that a request got of a step with drafts of it",
            buckets=range(1, MOST_DRAFTS + 2),
        )
