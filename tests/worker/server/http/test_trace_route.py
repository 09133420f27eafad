"""Route of a request: the response header, and the answer to `pdctl why --request`."""

from pathlib import Path

import httpx
import pytest

from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.tracing import trace_context
from pdcluster_worker.tracing.request_trace import RecentTraces, add_event
from tests.worker.server.conftest import Rig

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def post(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post("/v1/chat/completions", json=CHAT, headers=named)


@pytest.fixture
def decides(rig: Rig) -> None:
    """The backend notes a decision, and the context that it would pass on."""
    script = rig.backend.script

    def noting(spec: RequestSpec) -> list[int]:
        add_event("decode", worker="d1", cost=3)
        add_event("context", **trace_context.current())
        return script(spec)

    rig.backend.script = noting


@pytest.mark.usefixtures("decides")
async def test_route_header_is_there_for_those_that_ask(http: httpx.AsyncClient) -> None:
    requested, unasked, declined = (
        await post(http, x_pdcluster_route="1"),
        await post(http),
        await post(http, x_pdcluster_route="false"),
    )

    assert requested.headers["x-pdcluster-route"].startswith("decode worker=d1 cost=3")
    assert "x-pdcluster-route" not in unasked.headers
    assert "x-pdcluster-route" not in declined.headers


async def test_prefill_worker_of_the_header_goes_with_the_request(
    http: httpx.AsyncClient, rig: Rig
) -> None:
    named: list[str] = []
    script = rig.backend.script

    def noting(spec: RequestSpec) -> list[int]:
        named.append(spec.prefiller)
        return script(spec)

    rig.backend.script = noting
    for value in ("10.0.0.7:8000", " 10.0.0.7:8000 , 10.0.0.8:8000", " , 10.0.0.8:8000"):
        await post(http, x_prefiller_host_port=value)
    await post(http)

    assert named == ["10.0.0.7:8000", "10.0.0.7:8000", "", ""]

    named.clear()
    several = {**CHAT, "n": 3}  # those after the first find the prompt in the cache
    header = {"x-prefiller-host-port": "10.0.0.7:8000"}
    await http.post("/v1/chat/completions", json=several, headers=header)
    assert sorted(named) == ["", "", "10.0.0.7:8000"]


async def test_route_header_of_a_refusal_says_why(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/chat/completions", json={**CHAT, "model": "other"}, headers={"x-pdcluster-route": "1"}
    )

    assert response.status_code == 404
    assert response.headers["x-pdcluster-route"].startswith(
        "refused reason=model_not_found message=model_'other'"
    )


@pytest.mark.usefixtures("decides")
async def test_journey_of_a_request_is_found_by_its_id(http: httpx.AsyncClient) -> None:
    answer = await post(http)
    found = await http.get(f"/debug/requests/{answer.headers['x-request-id']}")
    by_completion = await http.get(f"/debug/requests/{answer.json()['id']}")

    (trace,) = found.json()["journeys"]
    names = [event["name"] for event in trace["events"]]
    assert [name for name in names if name != "context"] == [
        "issued",
        "decode",
        "answered",
        "ended",
    ]
    assert trace["events"][-2]["facts"] == {"status": 200}
    assert by_completion.json() == found.json()


async def test_traces_are_closed_to_clients_without_a_key_where_keys_are_required(
    rig: Rig, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    app = rig.make_app(tenant_of=ApiKeys(tmp_path).tenant_of)

    async def ask(address: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.get("/debug/requests/nothing", headers=headers)).status_code

    # a proxy in the pod comes from its loopback address
    addresses = ("10.0.0.9", "socket", "127.0.0.1", "::1")
    assert [await ask(address) for address in addresses] == [401] * 4
    assert [await ask(address, authorization="Bearer wrong") for address in addresses] == [401] * 4
    assert [await ask(address, authorization="Bearer secret") for address in addresses] == [404] * 4


async def test_requests_that_no_route_takes_push_no_journey_out(rig: Rig, tmp_path: Path) -> None:
    key = {"authorization": "Bearer sk-key"}
    async with rig.keyed(tmp_path, "key", traces=RecentTraces(kept=2)) as http:
        kept = await http.post("/v1/chat/completions", json=CHAT, headers=key)
        unauthenticated = [
            await http.post("/v1/chat/completions", json=CHAT),
            await http.post("/v1/nothing", headers=key),
            await http.post("/nothing"),
            await http.post("/health"),
            await http.post("/v1/chat/completions", json={**CHAT, "model": "other"}, headers=key),
        ]
        found = await http.get(f"/debug/requests/{kept.headers['x-request-id']}", headers=key)

    assert [response.status_code for response in unauthenticated] == [401, 404, 404, 405, 404]
    assert found.status_code == 200


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize(
    ("headers", "passed_on"),
    [
        (
            {"traceparent": PARENT, "tracestate": "a=b"},
            {"traceparent": PARENT, "tracestate": "a=b"},
        ),
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": "00-nonsense-01", "tracestate": "a=b"}, {}),
        ({"traceparent": PARENT.replace("b7ad6b7169203331", "0" * 16)}, {}),
        ({"tracestate": "a=b"}, {}),
        ({}, {}),
    ],
)
async def test_trace_context_of_a_client_is_taken_if_it_is_one(
    http: httpx.AsyncClient, headers: dict[str, str], passed_on: dict[str, str]
) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    (trace,) = (await http.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()[
        "journeys"
    ]

    assert [event["facts"] for event in trace["events"] if event["name"] == "context"] == [
        passed_on
    ]
