"""Limits of a tenant: requests a second, requests at once, tokens a minute."""

import pytest

from pdcluster_worker.qos_config import TenantPolicy
from pdcluster_worker.routing.qos.tenants import Tenants
from pdcluster_worker.routing.qos.verdict import Refusal
from pdcluster_worker.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tenants(clock: FakeClock) -> Tenants:
    return Tenants(clock)


def said(refusal: Refusal | None) -> tuple[str, int]:
    assert refusal is not None
    return refusal.code, refusal.retry_after_seconds


def test_requests_a_second_are_an_average_with_a_second_at_once(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantPolicy(requests_per_second=2.0)
    assert [tenants.begin("a", limits, 1) is None for _ in range(3)] == [True, True, False]
    assert tenants.begin("b", limits, 1) is None  # another tenant has a bucket of its own
    clock.advance(0.5)

    assert [tenants.begin("a", limits, 1) is None for _ in range(2)] == [True, False]


def test_less_than_one_request_a_second_says_how_long_to_wait(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantPolicy(requests_per_second=0.1)
    assert tenants.begin("a", limits, 1) is None
    clock.advance(2.5)
    refusal = tenants.begin("a", limits, 1)

    assert said(refusal) == ("tenant_requests", 8)
    assert refusal is not None
    assert refusal.message == "more than 0.1 requests a second of the API key 'a' (requestsPerSecond): retry later"


def test_requests_at_once_wait_for_one_to_end(tenants: Tenants) -> None:
    limits = TenantPolicy(max_concurrent_requests=2)
    for _ in range(2):
        assert tenants.begin("", limits, 1) is None
    tenants.end("", 5, seconds=30.0)
    assert tenants.begin("", limits, 1) is None
    refusal = tenants.begin("", limits, 1)

    assert said(refusal) == ("tenant_concurrency", 15)  # two requests of 30 s: one ends every 15 s
    assert refusal is not None
    assert "2 requests of all clients are open, and at most 2 may be" in refusal.message


def test_tokens_a_minute_are_prompts_and_answers(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantPolicy(tokens_per_minute=600)
    assert tenants.begin("a", limits, 500) is None
    assert said(tenants.begin("a", limits, 200)) == ("tenant_tokens", 10)
    tenants.end("a", 300, seconds=1.0)  # the answer was longer than what was left
    assert said(tenants.begin("a", limits, 1)) == ("tenant_tokens", 21)
    clock.advance(21)

    assert tenants.begin("a", limits, 1) is None


def test_prompt_beyond_the_tokens_of_a_minute_waits_for_a_full_bucket(tenants: Tenants, clock: FakeClock) -> None:
    limits = TenantPolicy(tokens_per_minute=60)
    assert tenants.begin("a", limits, 100) is None
    assert said(tenants.begin("a", limits, 100)) == ("tenant_tokens", 100)
    clock.advance(100)

    assert tenants.begin("a", limits, 100) is None


def test_refused_request_uses_nothing_and_a_limit_that_is_lifted_is_forgotten(tenants: Tenants) -> None:
    limits = TenantPolicy(requests_per_second=1.0, tokens_per_minute=60)
    assert tenants.begin("a", limits, 60) is None
    for _ in range(50):
        assert tenants.begin("a", limits, 60) is not None
    assert all(tenants.begin("a", TenantPolicy(), 10_000) is None for _ in range(100))

    assert tenants.begin("a", limits, 60) is None
