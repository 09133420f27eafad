"""Priority of a request, and its objectives."""

import pytest

from pdcluster_schema.qos import SloSpec, Tier
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.qos.slo import LatencySlo, slo_of
from pdcluster_worker.routing.qos.tiers import PriorityError, priority_of


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
def test_priority_is_the_one_asked_for_within_what_the_key_may_have(
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
