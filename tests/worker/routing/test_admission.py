"""The bounds of a worker's queue [V8]."""

import pytest

from pdcluster_schema.qos import AdmissionSpec
from pdcluster_worker.routing.admission import full


@pytest.mark.parametrize(
    ("queued", "tokens", "more", "reason"),
    [
        ((3, 0), 0, 99, None),
        (
            (4, 0),
            0,
            1,
            "4 requests wait for their first token (qos.admission.maxQueuedRequests is 4)",
        ),
        ((3, 100), 90, 10, None),
        (
            (3, 100),
            90,
            11,
            "90 prompt tokens wait here, and 11 more are over qos.admission.maxQueuedTokens (100)",
        ),
        ((0, 100), 0, 101, None),
        ((1, 100), 100, 0, None),
    ],
    ids=["no bound in tokens", "requests", "just in", "just over", "alone", "at the bound"],
)
def test_queue_is_bounded_in_requests_and_in_tokens(
    queued: tuple[int, int], tokens: int, more: int, reason: str | None
) -> None:
    num_queued, limit = queued
    found = full(
        AdmissionSpec(max_queued_requests=4, max_queued_tokens=limit), num_queued, tokens, more
    )

    assert found == reason if reason is None else found is not None and found.startswith(reason)
