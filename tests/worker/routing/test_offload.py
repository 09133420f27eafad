"""The offload decision at its edges: [O1] to [O3], [Y1], [Y7], and policies with other
numbers.
"""

from typing import Any, get_args

import pytest

from pdcluster_schema.policy import OffloadPolicy
from pdcluster_schema.routing import OffloadPolicyName, OffloadScoreSpec
from pdcluster_worker.routing.offload import (
    OffloadDecision,
    OffloadFacts,
    decide,
    length_threshold,
    score,
    takes_length,
)


def goes(policy: OffloadPolicy, prompt_tokens: int, threshold: int = 256, **others: Any) -> bool:
    return decide(policy, OffloadFacts(prompt_tokens=prompt_tokens, **others), threshold).is_remote


OTHER_NUMBERS = OffloadPolicy(prefill_queue_max=2, decode_load_threshold=1, min_offload_length=4)
# [Y1]: more than 1000 uncached tokens, fewer than 2 in the queue, whatever a decode worker does
ORIGINAL = OffloadPolicy(prefill_queue_max=2, decode_load_threshold=1 << 30)


@pytest.mark.parametrize(
    ("policy", "threshold", "facts", "expected"),
    [
        # tokens of the prompt, cached ones, those in the queue, active decodes
        *(
            pytest.param(OffloadPolicy(), 256, facts, expected, id=f"default: {name}")
            for name, facts, expected in [
                ("one short of the threshold", (255, 0, 0, 0), False),
                ("at the threshold", (256, 0, 0, 0), True),
                ("queue has one place left", (256, 0, 9, 0), True),
                ("queue is full", (256, 0, 10, 0), False),
                ("queue is full and decode not busy yet", (256, 0, 10, 7), False),
                ("a busy decode worker ignores the queue", (256, 0, 10, 8), True),
                ("busy, at the shorter threshold", (64, 0, 0, 8), True),
                ("busy, one short of it", (63, 0, 0, 8), False),
                ("short and not busy", (64, 0, 0, 7), False),
                ("fully cached", (1000, 1000, 0, 100), False),
                ("cached beyond the prompt", (1000, 1008, 0, 100), False),
                ("255 uncached", (1000, 745, 0, 0), False),
                ("256 uncached", (1000, 744, 0, 0), True),
            ]
        ),
        *(
            pytest.param(OTHER_NUMBERS, 32, facts, expected, id=f"other numbers: {facts}")
            for facts, expected in [
                ((32, 0, 1, 0), True),
                ((31, 0, 1, 0), False),
                ((32, 0, 2, 0), False),
                ((4, 0, 2, 1), True),
                ((3, 0, 2, 1), False),
            ]
        ),
        *(
            pytest.param(ORIGINAL, 1001, facts, expected, id=f"original: {name}")
            for name, facts, expected in [
                ("over both", (1001, 0, 1, 0), True),
                ("at the length", (1000, 0, 1, 0), False),
                ("at the queue", (1001, 0, 2, 0), False),
                ("half of it cached", (2002, 1001, 1, 0), True),
                ("half of it cached, at the length", (2002, 1002, 1, 0), False),
            ]
        ),
    ],
)
def test_rule_at_its_edges(
    policy: OffloadPolicy, threshold: int, facts: tuple[int, int, int, int], expected: bool
) -> None:
    """[O1] at the edges of [O2]."""
    names = ("prompt_tokens", "cached_tokens", "prefill_queue", "decode_active")

    assert goes(policy, threshold=threshold, **dict(zip(names, facts, strict=True))) == expected


def test_slo_feedback_goes_by_its_threshold_alone() -> None:
    """A busy decode worker moves the threshold, by what is measured; it does not pass it by."""
    policy = OffloadPolicy(policy="sloFeedback")

    assert [goes(policy, length, 300, decode_active=100) for length in (299, 300)] == [False, True]
    assert not goes(policy, 300, 300, prefill_queue=10)


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "prefill_queue", "points"),
    [
        pytest.param(256, 0, 0, 0.0, id="at the length"),
        pytest.param(257, 0, 0, 0.7, id="long"),
        pytest.param(257, 0, 10, 0.7, id="long, queue at its threshold"),
        pytest.param(257, 0, 11, 0.4, id="long, queue over it"),
        pytest.param(256, 0, 11, -0.3, id="short, queue over it"),
        pytest.param(1000, 744, 0, 0.0, id="uncached part at the length"),
        pytest.param(1000, 743, 0, 0.7, id="uncached part is long"),
    ],
)
def test_score_adds_what_is_over_its_threshold(
    prompt_tokens: int, cached_tokens: int, prefill_queue: int, points: float
) -> None:
    """[O3] with the document's numbers: a long prompt goes, and stays while the queue is over its
    threshold.
    """
    policy = OffloadPolicy(policy="score")
    facts = OffloadFacts(
        prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, prefill_queue=prefill_queue
    )

    assert score(policy, facts, 256) == pytest.approx(points)
    assert decide(policy, facts, 256) == OffloadDecision(points > 0.5, "score")


def test_score_has_to_be_over_the_least_score() -> None:
    """[O3]: strictly."""
    weights = OffloadScoreSpec(length_weight=0.5, min_score=0.5)
    policy = OffloadPolicy(policy="score", score=weights)

    assert not goes(policy, 300)
    assert goes(
        policy.model_copy(update={"score": weights.model_copy(update={"min_score": 0.49})}), 300
    )


def test_score_weighs_running_decodes_and_the_transfer_too() -> None:
    weights = OffloadScoreSpec(
        length_weight=0,
        queue_weight=0,
        decode_weight=1,
        transfer_weight=0.6,
        transfer_milliseconds=20,
    )
    policy = OffloadPolicy(policy="score", score=weights)

    assert [goes(policy, 9, decode_active=active) for active in (8, 9)] == [False, True]
    assert [
        goes(policy, 9, decode_active=9, transfer_seconds=seconds) for seconds in (0.020, 0.021)
    ] == [True, False]


@pytest.mark.parametrize("name", get_args(OffloadPolicyName))
def test_a_decode_worker_short_of_blocks_keeps_no_prompt(name: OffloadPolicyName) -> None:
    """[Y7]: strictly over the threshold, by every policy; what is wholly cached stays
    all the same.
    """
    policy, kept = OffloadPolicy(policy=name, decode_busy_ratio=0.9), {"cached_tokens": 90}

    assert not goes(policy, 100, **kept, decode_ratio=0.9)
    assert goes(policy, 100, **kept, decode_ratio=0.91)
    assert not goes(policy, 100, cached_tokens=100, decode_ratio=1.0)
    assert not goes(OffloadPolicy(policy=name), 100, **kept, decode_ratio=1.0)


@pytest.mark.parametrize("name", get_args(OffloadPolicyName))
def test_a_transfer_that_takes_too_long_keeps_a_prompt(name: OffloadPolicyName) -> None:
    policy = OffloadPolicy(policy=name, max_transfer_milliseconds=20)

    assert goes(policy, 5000, transfer_seconds=0.020)
    assert not goes(policy, 5000, transfer_seconds=0.021)
    assert goes(OffloadPolicy(policy=name), 5000, transfer_seconds=100.0)


@pytest.mark.parametrize("prefill_queue_max", [0, 10])
def test_when_idle_a_long_prompt_goes_whatever_the_queue_was(prefill_queue_max: int) -> None:
    facts = OffloadFacts(prompt_tokens=256, prefill_queue=99, decode_active=9, decode_ratio=1.0)
    policy = OffloadPolicy(prefill_queue_max=prefill_queue_max)

    assert decide(policy, facts.when_idle, 256) == OffloadDecision(True, "long")
    assert decide(policy, facts.when_idle, 257) == OffloadDecision(False, "short")


def test_length_threshold_is_that_of_the_accelerator() -> None:
    policy = OffloadPolicy(prefill_length_threshold=100, length_thresholds={"H100": 295})

    assert [length_threshold(policy, gpu) for gpu in ("H100", "cpu")] == [295, 100]


def test_a_worker_takes_prompts_that_leave_room_for_a_token() -> None:
    assert [takes_length(10, length) for length in (9, 10)] == [True, False]
    assert takes_length(0, 1 << 30)
