"""Service fields of a request: a priority by name or number, and latency objectives."""

import asyncio
from pathlib import Path

import httpx

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import EstimationSpec, SloSpec, TenantSpec
from pdcluster_worker.errors import RequestError

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def test_objectives_and_a_deadline_travel_with_the_request_and_count_from_its_arrival(rig):
    rig.policy = rig.policy.model_copy(
        update={"estimation": EstimationSpec(allow_client_deadline=True)}
    )
    times = iter([100.0])  # of the arrival
    async with rig.client(clock=lambda: next(times, 100.125)) as http:
        await http.post(
            CHAT,
            json=BODY
            | {"pdcluster": {"ttft_slo_ms": 250, "tpot_slo_ms": 40.5, "deadline_ms": 1500}},
        )
    spec = rig.backend.calls[0][0][0]

    assert spec.ttft_slo_seconds == 0.125
    assert spec.tpot_slo_seconds == 0.0405
    assert spec.deadline_seconds == 1.375


async def test_objectives_are_counted_as_met_or_missed_by_priority(rig, http):
    rig.policy = rig.policy.model_copy(
        update={"allow_client_priority": True, "slo": SloSpec(tpot_milliseconds=60_000.0)}
    )
    await http.post(CHAT, json=BODY | {"priority": "high"})
    await http.post(CHAT, json=BODY | {"priority": "low", "pdcluster": {"ttft_slo_ms": 1e-6}})

    def value(**labels: str) -> float:
        return rig.value("pdcluster_qos_slo_total", **labels)

    assert value(objective="ttft", priority="high", outcome="met") == 1
    assert value(objective="tpot", priority="high", outcome="met") == 1
    assert value(objective="ttft", priority="low", outcome="missed") == 1
    assert value(objective="ttft", priority="low", outcome="met") == 0


async def test_key_gives_a_priority_and_a_ceiling(rig, tmp_path: Path):
    policy = PolicyConfig(allow_client_priority=True, tenants={"batch": TenantSpec(priority="low")})
    rig.policy = policy

    async with asyncio.timeout(10), rig.keyed(tmp_path, "batch", "chat") as http:

        async def ask(key: str, **fields: object) -> httpx.Response:
            return await http.post(
                CHAT, json=BODY | fields, headers={"authorization": f"Bearer {key}"}
            )

        await ask("sk-batch")
        await ask("sk-chat")
        refused = await ask("sk-batch", priority="high")

    assert [specs[0].priority for specs, _ in rig.backend.calls] == [100, 0]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert "the highest of this API key is low" in refused.json()["error"]["message"]


async def test_tenant_beyond_its_limits_is_refused_and_others_are_not(rig, tmp_path: Path):
    """A place that was taken is given back however the request ends."""
    rig.policy = rig.policy.model_copy(
        update={"tenants": {"batch": TenantSpec(max_concurrent_requests=1)}}
    )
    rig.backend.hold_after = 0

    async with asyncio.timeout(10), rig.keyed(tmp_path, "batch", "chat") as http:

        async def ask(key: str) -> httpx.Response:
            return await http.post(CHAT, json=BODY, headers={"authorization": f"Bearer {key}"})

        first = asyncio.create_task(ask("sk-batch"))
        await rig.backend.holding.wait()
        refused = await ask("sk-batch")
        rig.backend.hold_after = None
        other = await ask("sk-chat")
        rig.backend.gate.set()
        await first
        rig.backend.error = RequestError("broken", status=500)
        await ask("sk-batch")
        rig.backend.error = None
        again = await ask("sk-batch")

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "tenant_concurrency"
    assert (
        "of the API key 'batch' are open, and at most 1 may be (maxConcurrentRequests)"
        in refused.json()["error"]["message"]
    )
    assert (other.status_code, again.status_code) == (200, 200)
    assert (
        rig.value("pdcluster_qos_rejected_total", reason="tenant_concurrency", priority="normal")
        == 1
    )
    assert rig.value("pdcluster_request_rejected_total", reason="tenant_concurrency") == 1


async def test_each_choice_counts_against_the_limits_of_a_tenant(rig, http):
    rig.policy = rig.policy.model_copy(
        update={"tenant_defaults": TenantSpec(requests_per_second=4.0, max_concurrent_requests=4)}
    )
    taken = await http.post(
        "/v1/completions", json={"model": "tiny", "prompt": ["Hi", "Ho"], "n": 2}
    )
    late = await http.post(CHAT, json=BODY)
    never = await http.post(CHAT, json=BODY | {"n": 5})

    assert (taken.status_code, late.status_code, never.status_code) == (200, 429, 400)
    assert late.json()["error"]["code"] == "tenant_requests"
    assert never.json()["error"]["param"] == "n"
    assert (
        "more than the 4 that may be open of this API key (maxConcurrentRequests)"
        in never.json()["error"]["message"]
    )


async def test_tenant_gets_its_share_at_one_of_several_ingresses(rig, http):
    rig.policy = rig.policy.model_copy(
        update={"tenant_defaults": TenantSpec(requests_per_second=4.0)}
    )
    rig.backend.ingresses = 4
    statuses = [(await http.post(CHAT, json=BODY)).status_code for _ in range(2)]

    assert statuses == [200, 429]
