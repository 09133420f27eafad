"""The page over HTTP: which clients get it, its headers, and the overview that it draws."""

import json
from pathlib import Path

import httpx
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.app import create_prefill_app
from pdcluster_worker.server.http.limits import TOO_MANY_CONNECTIONS
from tests.worker.fake_clock import FakeClock
from tests.worker.server.conftest import Rig, asgi_client

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
ON_IMPORT = ("api.js", "conditions.js", "health.js", "redraw.js", "trace.js")
ASSETS = (*ON_IMPORT, "chat.js", "cluster.js", "icon.svg", "page.css")


async def test_a_browser_gets_the_page_and_its_files(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    head = await http.head("/", headers=BROWSER)

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == page.headers["content-length"]
    assert page.headers["vary"] == "accept"
    for name in ASSETS:
        assert f"page/{name}" in page.text or name in ON_IMPORT
        asset = await http.get(f"/page/{name}")
        assert (asset.status_code, asset.headers["x-content-type-options"]) == (200, "nosniff")
        policy = asset.headers["content-security-policy"]
        assert policy == page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy


async def test_nothing_of_the_page_is_elsewhere(http: httpx.AsyncClient) -> None:
    text = (await http.get("/", headers=BROWSER)).text
    for name in ASSETS:
        text += (await http.get(f"/page/{name}")).text
    addresses = text.replace("http://www.w3.org/2000/svg", "")

    assert "://" not in addresses
    assert "style=" not in addresses
    assert "<script>" not in addresses


@pytest.mark.parametrize(
    ("method", "accept"),
    [
        ("GET", "*/*"),
        ("GET", ""),
        ("GET", "application/json"),
        ("GET", "text/html;q=0, */*"),
        ("GET", "text/html;q=0., application/xhtml+xml; Q=0.000"),
        ("GET", "text/htmlx"),
        ("POST", "text/html"),
    ],
)
async def test_other_clients_find_nothing_there_as_before(
    http: httpx.AsyncClient, method: str, accept: str
) -> None:
    answer = await http.request(method, "/", headers={"accept": accept})

    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{method} /: there is no such path")
    assert answer.headers.get("vary") == (None if method == "POST" else "accept")


@pytest.mark.parametrize(
    "accept", ["text/html;q=0, application/xhtml+xml", "text/html;level=1;q=0.001", "text/html;q=x"]
)
async def test_one_kind_of_html_that_is_taken_is_enough(
    http: httpx.AsyncClient, accept: str
) -> None:
    assert (await http.get("/", headers={"accept": accept})).status_code == 200


async def test_no_page_at_a_prefill_worker(rig: Rig) -> None:
    app = create_prefill_app(rig.backend, Metrics(), PolicyConfig)
    async with asgi_client(app) as http:
        for path in ("/", "/page/page.css", "/debug/cluster"):
            assert (await http.get(path, headers=BROWSER)).status_code == 404


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/debug/cluster"])
async def test_a_client_that_has_it_gets_304(http: httpx.AsyncClient, path: str) -> None:
    first = await http.get(path, headers=BROWSER)
    again, every, other = [
        await http.get(path, headers={**BROWSER, "if-none-match": tag})
        for tag in (f'"x", W/{first.headers["etag"]}', "*", '"x"')
    ]

    assert (again.status_code, again.content, other.status_code) == (304, b"", 200)
    assert (every.status_code, every.headers.get("vary")) == (304, first.headers.get("vary"))
    assert again.headers["etag"] == first.headers["etag"]
    assert first.headers["cache-control"] == "private, no-cache"


async def test_without_javascript_it_names_the_model_and_escapes_it(rig: Rig) -> None:
    rig.backend.model_name = "<tiny>"
    async with rig.client() as http:
        text = (await http.get("/", headers=BROWSER)).text

    hint = text.partition("<noscript>")[2].partition("</noscript>")[0]
    assert '"model": "&lt;tiny&gt;"' in hint
    assert "curl ADDRESS/v1/chat/completions" in hint


async def test_behind_keys_the_page_names_nothing_and_the_overview_needs_one(
    rig: Rig, tmp_path: Path
) -> None:
    async with rig.keyed(tmp_path, "alice") as http:
        page = await http.get("/", headers=BROWSER)
        refused = await http.get("/debug/cluster")
        wrong = await http.get("/debug/cluster", headers={"x-api-key": "guess"})
        answer = await http.get("/debug/cluster", headers={"authorization": "Bearer sk-alice"})

    assert page.status_code == 200
    assert "tiny" not in page.text
    assert [each.json()["error"]["code"] for each in (refused, wrong)] == ["invalid_api_key"] * 2
    assert answer.json()["model"] == "tiny"
    assert "sk-alice" not in answer.text + str(answer.headers)


async def test_overview_is_made_once_a_second_for_all_browsers(rig: Rig) -> None:
    clock = FakeClock()
    async with rig.client(clock=clock) as http:
        answers = [(await http.get("/debug/cluster")).content for _ in range(10)]
        clock.advance(1.0)
        later = await http.get("/debug/cluster")

    assert (len(set(answers)), rig.backend.num_overviews) == (1, 2)
    assert later.content != answers[0]
    assert json.loads(answers[0])["workers"][1] == {
        "pod": "c-prefill-0",
        "role": "prefill",
        "pool": "cpu",
        "state": "ready",
        "note": "",
        "device": "Xeon",
        "figures": {
            "num_running": 2,
            "num_waiting": 1,
            "used_blocks": 25,
            "total_blocks": 100,
            "num_transfers": 1,
            "kv_bytes": 1000,
            "remote_prefills": 1,
            "local_prefills": 1,
            "tiers": [],
        },
    }


async def test_a_worker_that_does_not_serve_yet_says_why(rig: Rig, http: httpx.AsyncClient) -> None:
    rig.backend.not_ready = "this worker is not ready: the engine is loading the model"
    answer = await http.get("/debug/cluster")

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert (await http.get("/", headers=BROWSER)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/debug/cluster"])
async def test_a_browser_takes_no_connection_that_is_spared_for_probes(rig: Rig, path: str) -> None:
    async def crowded(scope, receive, send):
        await rig.app({**scope, "state": {TOO_MANY_CONNECTIONS: True}}, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(crowded), base_url="http://test"
    ) as http:
        answer = await http.get(path, headers=BROWSER)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "connections_full")


async def test_the_schema_has_the_overview(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    answer = document["paths"]["/debug/cluster"]["get"]["responses"]["200"]
    name = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]

    assert "workers" in document["components"]["schemas"][name]["properties"]
    assert "/" not in document["paths"]
