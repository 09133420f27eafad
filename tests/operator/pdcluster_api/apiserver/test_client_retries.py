"""Retries of the client after answers that the real API server gives only under load
or in failure.
"""

import json
from urllib.parse import parse_qsl, urlsplit

import pytest

from pdcluster_api.apiserver.client import MOST_PAGE_BYTES, ClientLimits
from pdcluster_api.apiserver.errors import (
    ConflictError,
    GoneError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from pdcluster_api.apiserver.kinds import CONFIG_MAP, SERVICE
from pdcluster_operator.informer.watches import Selection, watch
from tests.operator.pdcluster_api.apiserver.answering_server import (
    AnsweringServer,
    hangs_up,
    never_answers,
    says,
    says_text,
)

BODY = {"metadata": {"name": "chat", "namespace": "x"}}
OWN_FIELDS = "fieldManager=pdcluster-operator&fieldValidation=Ignore"


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_client_tries_again_after_what_the_server_asks_for(code: int):
    async with AnsweringServer([says(code, **{"Retry-After": "3"}), says(200, BODY)]) as server:
        assert await server.client.get(SERVICE, "x", "chat") == BODY
        assert [3.0 <= seconds <= 3.75 for seconds in server.slept] == [True]
        assert server.count("api_calls_total", verb="get", kind="Service", code=str(code)) == 1
        assert server.count("api_calls_total", verb="get", kind="Service", code="200") == 1


async def test_client_waits_no_longer_than_its_limit():
    async with AnsweringServer(
        [says(429, **{"Retry-After": "3600"}), says(200, BODY)], ClientLimits(max_delay_seconds=2.0)
    ) as server:
        await server.client.get(SERVICE, "x", "chat")
        assert server.slept[0] <= 2.5


async def test_client_gives_up_after_its_tries_with_growing_delays():
    async with AnsweringServer([says(503)] * 4) as server:
        with pytest.raises(UnavailableError, match="answered 503"):
            await server.client.get(SERVICE, "x", "chat")
        assert [
            round(seconds / base, 1) >= 1.0
            for seconds, base in zip(server.slept, (0.2, 0.4, 0.8), strict=True)
        ] == [True] * 3
        assert (
            server.count("api_errors_total", verb="get", kind="Service", error="UnavailableError")
            == 1
        )


async def test_client_tries_again_after_a_cut_connection():
    async with AnsweringServer([hangs_up, says(200, BODY)]) as server:
        assert await server.client.apply(SERVICE, BODY) == BODY
        assert len(server.seen) == 2
        assert server.count("api_calls_total", verb="apply", kind="Service", code="0") == 1


async def test_client_limits_the_time_of_a_request():
    async with AnsweringServer(
        [never_answers], ClientLimits(timeout_seconds=0.05, tries=1)
    ) as server:
        with pytest.raises(UnavailableError, match="does not answer"):
            await server.client.get(SERVICE, "x", "chat")


@pytest.mark.parametrize("text", ["<html>sign in</html>", "[]"])
async def test_client_takes_a_proxy_s_page_for_no_answer(text: str):
    async with AnsweringServer([says_text(200, text)], ClientLimits(tries=1)) as server:
        with pytest.raises(UnavailableError, match="is there a proxy in between"):
            await server.client.get(SERVICE, "x", "chat")


async def test_client_does_not_repeat_what_is_refused():
    async with AnsweringServer([says(409), says(422)]) as server:
        with pytest.raises(ConflictError):
            await server.client.create(SERVICE, BODY)
        with pytest.raises(RefusedError):
            await server.client.apply(SERVICE, BODY)
        assert server.slept == []
        assert (
            server.count("api_errors_total", verb="create", kind="Service", error="ConflictError")
            == 0
        )
        assert (
            server.count("api_errors_total", verb="apply", kind="Service", error="RefusedError")
            == 1
        )


async def test_list_reads_pages_and_names_each_item_s_kind():
    pages = [
        says(200, {"metadata": {"continue": "more"}, "items": [{"a": 1}]}),
        says(200, {"metadata": {}, "items": [{"a": 2}]}),
    ]
    async with AnsweringServer(pages, ClientLimits(page=1)) as server:
        found = [
            body async for body in server.client.list(CONFIG_MAP, "x", labels="a=b", fields="c=d")
        ]
        assert found == [
            {"apiVersion": "v1", "kind": "ConfigMap", "a": number} for number in (1, 2)
        ]
        assert [path for _, path, _ in server.seen] == [
            "/api/v1/namespaces/x/configmaps?limit=1&labelSelector=a%3Db&fieldSelector=c%3Dd",
            "/api/v1/namespaces/x/configmaps?limit=1&labelSelector=a%3Db&fieldSelector=c%3Dd&continue=more",
        ]


@pytest.mark.parametrize(("num_bytes", "limit"), [(10, 500), (2**19, 8), (2**23, 1)])
async def test_pages_of_large_objects_are_shorter(num_bytes: int, limit: int):
    body = {"metadata": {"continue": "more"}, "items": [{"a": "b" * num_bytes}]}
    answers = [says(200, body), says(200, {"metadata": {}, "items": []})]
    async with AnsweringServer(answers) as server:
        [body async for body in server.client.list(CONFIG_MAP, "x")]
        first, second = [dict(parse_qsl(urlsplit(path).query)) for _, path, _ in server.seen]
        assert (first["limit"], int(second["limit"])) == ("10", pytest.approx(limit, abs=1))


async def test_a_page_of_unexpectedly_large_objects_is_read_again_in_parts():
    small = {"metadata": {"continue": "more"}, "items": [{"a": 1}]}
    large = {"metadata": {}, "items": [{"a": "b" * MOST_PAGE_BYTES}]}
    answers = [says(200, small), *[says(200, large)] * 3]
    async with AnsweringServer(answers, ClientLimits(page=10)) as server:
        found = [body async for body in server.client.list(CONFIG_MAP, "x")]
        assert [len(str(body["a"])) for body in found] == [1, MOST_PAGE_BYTES]
        seen = [dict(parse_qsl(urlsplit(path).query)) for _, path, _ in server.seen]
        assert [each["limit"] for each in seen] == ["10", "10", "2", "1"]
        assert [each.get("continue") for each in seen] == [None, "more", "more", "more"]


async def test_a_watch_goes_on_over_a_line_of_any_length():
    versions, text = ("2", "3", "4"), "\u0001" * 2**20
    objects = [{"metadata": {"resourceVersion": each}, "data": {"a": text}} for each in versions]
    lines = [json.dumps({"type": "ADDED", "object": each}) + "\n" for each in objects]
    assert len(lines[0]) > 6 * 2**20
    async with AnsweringServer([says_text(200, "".join(lines))]) as server:
        events = [each async for each in watch(server.client, Selection(CONFIG_MAP, "x"), "1")]
    assert tuple(each.version for each in events) == versions
    assert {each.body["data"]["a"] for each in events} == {text}


async def test_list_starts_again_when_its_version_is_gone():
    first = says(200, {"metadata": {"continue": "old"}, "items": [{"a": 1}]})
    answers = [first, says(410), says(200, {"items": [{"a": 1}, {"a": 2}]})]
    async with AnsweringServer(answers) as server:
        assert [body["a"] async for body in server.client.list(CONFIG_MAP)] == [1, 1, 2]
        assert server.seen[2][1] == "/api/v1/configmaps?limit=500"


async def test_list_that_is_gone_again_and_again_is_an_error():
    first = says(200, {"metadata": {"continue": "old"}, "items": []})
    async with AnsweringServer([first, says(410)] * 4) as server:
        with pytest.raises(GoneError):
            [body async for body in server.client.list(CONFIG_MAP)]


async def test_list_of_an_unknown_kind_is_an_error():
    async with AnsweringServer([says_text(404, "404 page not found")]) as server:
        with pytest.raises(NotFoundError):
            [body async for body in server.client.list(CONFIG_MAP)]


async def test_requests_say_what_is_meant():
    async with AnsweringServer([says(200)] * 5) as server:
        await server.client.apply(SERVICE, BODY)
        await server.client.apply(SERVICE, BODY, force=False)
        await server.client.create(SERVICE, BODY)
        await server.client.patch_status(SERVICE, "x", "chat", [])
        await server.client.delete(SERVICE, "x", "chat", uid="u")
        services, query = "/api/v1/namespaces/x/services", OWN_FIELDS
        assert [(method, path) for method, path, _ in server.seen] == [
            ("PATCH", f"{services}/chat?{query}&force=true"),
            ("PATCH", f"{services}/chat?{query}&force=false"),
            ("POST", f"{services}?{query}"),
            ("PATCH", f"{services}/chat/status?{query}"),
            ("DELETE", f"{services}/chat"),
        ]
        assert server.seen[4][2]["preconditions"] == {"uid": "u"}
        assert server.seen[4][2]["propagationPolicy"] == "Background"
