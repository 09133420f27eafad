"""Priorities, objectives, bounds of the queue [V8], and verdicts under load [O6] [O7]."""

from math import inf

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import (
    AdmissionSpec,
    DegradationSpec,
    EarlyRejectionSpec,
    HighPrioritySpec,
    LowPrioritySpec,
    SloSpec,
    SmallerModelSpec,
    Tier,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.offload import OffloadPolicy
from pdcluster_worker.routing.qos.load_shedding import (
    MAX_RETRY_SECONDS,
    Degradation,
    LatencySlo,
    LoadEstimate,
    PriorityError,
    degradation,
    full,
    offloads_at_once,
    pressure,
    priority_of,
    refusal,
    retry_after,
    seconds_until_capacity,
    slo_of,
)


@pytest.mark.parametrize(
    ("requested", "ceiling", "client_decides", "expected"),
    [
        (None, None, False, 0),
        (0, None, False, 0),
        (-7, None, True, -7),
        (None, "high", False, -100),
        (None, "low", True, 100),
        (100, "low", False, 100),
        (5, "normal", True, 5),
        (-1, "high", True, -1),
    ],
)
def test_priority_is_the_requested_one_within_what_the_key_may_have(
    requested: int | None, ceiling: Tier | None, client_decides: bool, expected: int
) -> None:
    assert priority_of(requested, ceiling, client_decides=client_decides) == expected


@pytest.mark.parametrize(
    ("requested", "ceiling", "client_decides", "words"),
    [
        (-1, None, False, "leave it out, or set qos.allowClientPriority"),
        (1, None, False, "leave it out, or set qos.allowClientPriority"),
        (0, "low", False, "leave it out, or set qos.allowClientPriority"),
        (0, "low", True, "0 is normal, and the highest of this API key is low"),
        (-100, "normal", True, "-100 is high, and the highest of this API key is normal"),
    ],
)
def test_priority_beyond_that_is_refused(
    requested: int, ceiling: Tier | None, client_decides: bool, words: str
) -> None:
    with pytest.raises(PriorityError, match=words):
        priority_of(requested, ceiling, client_decides=client_decides)


def test_objectives_of_a_request_go_before_those_of_the_policy() -> None:
    plain = RequestSpec("r", [1], SamplingParams(max_tokens=1, seed=1))
    own = RequestSpec(
        "r", [1], SamplingParams(max_tokens=1, seed=1), ttft_slo_seconds=0.2, tpot_slo_seconds=0.03
    )
    policy = SloSpec(tpot_milliseconds=40.0)

    assert slo_of(plain, SloSpec()) == LatencySlo(0.5, None)
    assert slo_of(plain, policy) == LatencySlo(0.5, 0.04)
    assert slo_of(own, policy) == LatencySlo(0.2, 0.03)


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


SLO = LatencySlo(0.5, 0.04)
EARLY = PolicyConfig(early_rejection=EarlyRejectionSpec(enabled=True))


@pytest.mark.parametrize(
    ("tier", "ttft", "code"),
    [
        ("low", 0.5, None),  # iff it is more
        ("low", 0.501, "slo_ttft"),
        ("normal", 9.0, None),
        ("high", 9.0, None),
        ("low", None, None),
    ],
)
def test_low_priority_is_refused_iff_its_first_token_would_be_late(
    tier: Tier, ttft: float | None, code: str | None
) -> None:
    refused = refusal(EARLY, tier, 10, SLO, LoadEstimate(ttft))

    assert (refused.code if refused else None) == code


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (PolicyConfig(), None),
        (
            PolicyConfig(
                early_rejection=EarlyRejectionSpec(enabled=True, reject_on_slo_violation=False)
            ),
            None,
        ),
        (EARLY, "slo_ttft"),
    ],
    ids=["off", "reject_on_slo_violation false", "on"],
)
def test_refusal_is_the_policy_of_early_rejection(policy: PolicyConfig, code: str | None) -> None:
    refused = refusal(policy, "low", 10, SLO, LoadEstimate(2.0, 1.0))

    assert (refused.code if refused else None) == code


def test_refusal_says_the_figures_and_when_to_come_back() -> None:
    late = refusal(EARLY, "low", 10, SLO, LoadEstimate(2.6))
    slow = refusal(EARLY, "low", 10, SLO, LoadEstimate(0.1, 0.0551, turn_seconds=3.2))

    assert late is not None
    assert (late.retry_after_seconds, late.message) == (
        3,  # 2.1 s until the estimate is the objective
        "low priority: the first token would take about 2.6 s, over the objective of 0.5 s: retry "
        "later",
    )
    assert slow is not None
    assert (slow.code, slow.retry_after_seconds) == ("slo_tpot", 4)
    assert (
        "one more stream would make each token take about 55 ms, over the objective of 40 ms"
        in slow.message
    )


def test_refusal_names_a_smaller_model_where_there_is_one() -> None:
    smaller = DegradationSpec(smaller_model=SmallerModelSpec(name="tiny", url="http://tiny/v1"))
    refused = refusal(
        PolicyConfig(early_rejection=EARLY.early_rejection, degradation=smaller),
        "low",
        10,
        SLO,
        LoadEstimate(2.0),
    )

    assert refused is not None
    assert refused.message.endswith("retry later, or ask for the model tiny at http://tiny/v1")


@pytest.mark.parametrize(
    ("tier", "prompt", "ttft", "is_refused"),
    [
        ("low", 101, 0.4, True),
        ("low", 100, 0.4, False),
        ("low", 101, 0.39, False),
        ("normal", 101, 9.0, False),
    ],
)
def test_long_prompts_of_low_priority_are_refused_under_load(
    tier: Tier, prompt: int, ttft: float, is_refused: bool
) -> None:
    policy = PolicyConfig(degradation=DegradationSpec(max_prompt_tokens=100))
    refused = refusal(policy, tier, prompt, SLO, LoadEstimate(ttft))

    assert (refused is not None and refused.code == "prompt_limit") == is_refused


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (LoadEstimate(), 0.0),
        (LoadEstimate(0.25), 0.5),
        (LoadEstimate(0.25, 0.03), 0.75),
        (LoadEstimate(None, 0.05), 1.25),
    ],
)
def test_pressure_is_the_larger_share_of_an_objective(
    estimate: LoadEstimate, expected: float
) -> None:
    assert pressure(estimate, SLO) == pytest.approx(expected)
    assert pressure(LoadEstimate(None, 9.0), LatencySlo(0.5, None)) == 0.0


@pytest.mark.parametrize(
    ("workers", "tier", "load", "expected"),
    [
        ("Allowed", "low", 0.8, Degradation(200)),
        ("Allowed", "low", 0.79, Degradation()),
        ("Allowed", "normal", 9.0, Degradation()),
        ("WhenCalm", "low", 0.79, Degradation()),
        ("WhenCalm", "low", 0.8, Degradation(200, is_local=True)),
        ("Barred", "low", 0.0, Degradation(None, is_local=True)),
        ("Barred", "high", 9.0, Degradation()),
    ],
)
def test_low_priority_loses_tokens_and_prefill_workers(
    workers, tier: Tier, load: float, expected: Degradation
) -> None:
    policy = PolicyConfig(
        degradation=DegradationSpec(max_tokens=200),
        low_priority=LowPrioritySpec(prefill_workers=workers),
    )

    assert degradation(policy, tier, load) == expected


@pytest.mark.parametrize(
    ("tier", "uncached", "at_once", "goes"),
    [
        ("high", 64, True, True),
        ("high", 63, True, False),
        ("high", 999, False, False),
        ("normal", 999, True, False),
    ],
)
def test_high_priority_may_go_to_a_prefill_worker_at_once(
    tier: Tier, uncached: int, at_once: bool, goes: bool
) -> None:
    assert (
        offloads_at_once(
            PolicyConfig(high_priority=HighPrioritySpec(offload_at_once=at_once)), tier, uncached
        )
        == goes
    )


def test_a_cached_prompt_goes_nowhere_at_once() -> None:
    policy = PolicyConfig(
        high_priority=HighPrioritySpec(offload_at_once=True),
        offload=OffloadPolicy(min_offload_length=0),
    )

    assert not offloads_at_once(policy, "high", 0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, 1), (0.0, 1), (-3.0, 1), (1.01, 2), (1e9, MAX_RETRY_SECONDS), (inf, MAX_RETRY_SECONDS)],
)
def test_retry_after_is_whole_seconds_within_bounds(seconds: float | None, expected: int) -> None:
    assert retry_after(seconds) == expected


@pytest.mark.parametrize(
    ("num_queued", "num_tokens", "rate", "token_seconds", "expected"),
    [
        (4, 0, 0.5, None, 2.0),  # one has to get its first token
        (6, 0, 0.5, None, 6.0),
        (4, 0, 0.0, None, None),
        (1, 150, 0.5, 0.1, 5.0),  # 50 tokens are too many
        (1, 150, 0.5, None, None),
        (5, 150, 0.5, 0.1, 5.0),
    ],
)
def test_a_full_queue_has_room_again_at_its_recent_pace(
    num_queued: int,
    num_tokens: int,
    rate: float,
    token_seconds: float | None,
    expected: float | None,
) -> None:
    policy = AdmissionSpec(max_queued_requests=4, max_queued_tokens=100)

    assert seconds_until_capacity(policy, num_queued, num_tokens, rate, token_seconds) == expected
