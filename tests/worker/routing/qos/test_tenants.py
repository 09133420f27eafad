"""Limits of a tenant: requests a second, requests at once, tokens a minute."""

import pytest

from pdcluster_schema.qos import TenantSpec
from pdcluster_worker.routing.qos.load_shedding import LoadRefusal
from pdcluster_worker.routing.qos.tenants import Demand, Tenants
from tests.worker.fake_clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tenants(clock: FakeClock) -> Tenants:
    return Tenants(clock)


def said(refusal: LoadRefusal | None) -> tuple[str, int]:
    assert refusal is not None
    return refusal.code, refusal.retry_after_seconds


def test_requests_a_second_are_an_average_with_a_second_at_once(
    tenants: Tenants, clock: FakeClock
) -> None:
    limits = TenantSpec(requests_per_second=2.0)
    assert [tenants.begin("a", limits, Demand(1)) is None for _ in range(3)] == [True, True, False]
    assert tenants.begin("b", limits, Demand(1)) is None  # another tenant has a bucket of its own
    clock.advance(0.5)

    assert [tenants.begin("a", limits, Demand(1)) is None for _ in range(2)] == [True, False]


def test_less_than_one_request_a_second_says_how_long_to_wait(
    tenants: Tenants, clock: FakeClock
) -> None:
    limits = TenantSpec(requests_per_second=0.1)
    assert tenants.begin("a", limits, Demand(1)) is None
    clock.advance(2.5)
    refusal = tenants.begin("a", limits, Demand(1))

    assert said(refusal) == ("tenant_requests", 8)
    assert refusal is not None
    assert (
        refusal.message
        == "more than 0.1 requests a second of the API key 'a' (requestsPerSecond; each choice of "
        "each prompt is one): retry later"
    )


def test_requests_at_once_wait_for_one_to_end(tenants: Tenants) -> None:
    limits = TenantSpec(max_concurrent_requests=2)
    for _ in range(2):
        assert tenants.begin("", limits, Demand(1)) is None
    tenants.end("", Demand(0), 5, seconds=30.0)
    assert tenants.begin("", limits, Demand(1)) is None
    refusal = tenants.begin("", limits, Demand(1))

    assert said(refusal) == ("tenant_concurrency", 15)  # two requests of 30 s: one ends every 15 s
    assert refusal is not None
    assert "2 requests of all clients are open, and at most 2 may be" in refusal.message


def test_tokens_a_minute_are_prompts_and_answers(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantSpec(tokens_per_minute=600)
    assert tenants.begin("a", limits, Demand(500)) is None
    assert said(tenants.begin("a", limits, Demand(200))) == ("tenant_tokens", 10)
    tenants.end("a", Demand(0), 300, seconds=1.0)  # the answer was longer than what was left
    assert said(tenants.begin("a", limits, Demand(1))) == ("tenant_tokens", 21)
    clock.advance(21)

    assert tenants.begin("a", limits, Demand(1)) is None


def test_prompt_beyond_the_tokens_of_a_minute_waits_for_a_full_bucket(
    tenants: Tenants, clock: FakeClock
) -> None:
    limits = TenantSpec(tokens_per_minute=60)
    assert tenants.begin("a", limits, Demand(100)) is None
    assert said(tenants.begin("a", limits, Demand(100))) == ("tenant_tokens", 100)
    clock.advance(100)

    assert tenants.begin("a", limits, Demand(100)) is None


def test_refused_request_uses_nothing_and_a_limit_that_is_lifted_is_forgotten(
    tenants: Tenants,
) -> None:
    limits = TenantSpec(requests_per_second=1.0, tokens_per_minute=60)
    assert tenants.begin("a", limits, Demand(60)) is None
    for _ in range(50):
        assert tenants.begin("a", limits, Demand(60)) is not None
    assert all(tenants.begin("a", TenantSpec(), Demand(10_000)) is None for _ in range(100))

    assert tenants.begin("a", limits, Demand(60)) is None


def test_each_choice_of_each_prompt_is_a_request(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantSpec(requests_per_second=4.0)
    assert tenants.begin("a", limits, Demand(1, num_sequences=3)) is None
    assert said(tenants.begin("a", limits, Demand(1, num_sequences=2))) == ("tenant_requests", 1)
    assert tenants.begin("a", limits, Demand(1)) is None
    clock.advance(1.0)
    # more than a second's: waits for all, and owes
    assert tenants.begin("a", limits, Demand(1, num_sequences=12)) is None
    refusal = tenants.begin("a", limits, Demand(1))

    assert said(refusal) == ("tenant_requests", 3)


def test_each_choice_holds_a_seat(tenants: Tenants) -> None:
    limits, three = TenantSpec(max_concurrent_requests=4), Demand(1, num_sequences=3)
    assert tenants.begin("a", limits, three) is None
    assert said(tenants.begin("a", limits, Demand(1, num_sequences=2)))[0] == "tenant_concurrency"
    assert tenants.begin("a", limits, Demand(1)) is None
    tenants.end("a", three, 0, seconds=1.0)

    assert tenants.begin("a", limits, three) is None


def test_ingresses_share_the_limits_evenly(clock: FakeClock) -> None:
    """All of them together never let through more than the limit."""
    live = [4]
    ingresses = [Tenants(clock, lambda: live[0]) for _ in range(4)]
    limits = TenantSpec(requests_per_second=8.0, max_concurrent_requests=9, tokens_per_minute=400)

    def taken(limits: TenantSpec, demand: Demand) -> int:
        return sum(each.begin("a", limits, demand) is None for each in ingresses for _ in range(20))

    assert taken(TenantSpec(requests_per_second=8.0), Demand(1)) == 8
    assert taken(TenantSpec(tokens_per_minute=400), Demand(50)) == 8
    fresh = ingresses[0] = Tenants(clock, lambda: live[0])
    assert [fresh.begin("a", limits, Demand(1)) is None for _ in range(3)] == [True, True, False]
    refusal = fresh.begin("a", limits.model_copy(update={"requests_per_second": None}), Demand(1))
    assert refusal is not None
    assert "at most 2 may be" in refusal.message
    assert "at this one of 4 ingress workers" in refusal.message
    live[0] = 1  # the others have gone: it has the whole

    assert (
        fresh.begin("a", limits.model_copy(update={"requests_per_second": None}), Demand(1)) is None
    )


def test_request_of_more_choices_than_a_share_is_taken_alone(clock: FakeClock) -> None:
    tenants, limits = Tenants(clock, lambda: 4), TenantSpec(max_concurrent_requests=8)
    assert tenants.begin("a", limits, Demand(1, num_sequences=8)) is None

    assert said(tenants.begin("a", limits, Demand(1)))[0] == "tenant_concurrency"


def test_duration_of_requests_is_forgotten_by_time(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantSpec(max_concurrent_requests=1)
    for seconds, pause in ((500.0, 4 * 3600.0), (1.5, 0.0)):
        assert tenants.begin("a", limits, Demand(1)) is None
        tenants.end("a", Demand(1), 0, seconds)
        clock.advance(pause)
    assert tenants.begin("a", limits, Demand(1)) is None

    assert said(tenants.begin("a", limits, Demand(1))) == ("tenant_concurrency", 2)
