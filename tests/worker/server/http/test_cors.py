"""Web pages of other origins that may call the API: preflights without a key, and headers of
answers for browsers.
"""

from pathlib import Path

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.service import CorsSpec

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-stainless-lang",
}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def allow(rig, **fields) -> None:
    rig.policy = PolicyConfig(cors=CorsSpec(**{"allowed_origins": [PAGE], **fields}))


async def test_a_preflight_needs_no_key_and_the_request_does(rig, tmp_path: Path):
    allow(rig)
    async with rig.keyed(tmp_path, "alice") as client:
        requested = await client.options(CHAT, headers=ASKED)
        refused = await client.post(CHAT, json=HELLO, headers={"origin": PAGE})
        served = await client.post(
            CHAT, json=HELLO, headers={"origin": PAGE, "authorization": "Bearer sk-alice"}
        )

    assert requested.status_code == 200
    assert requested.headers["access-control-allow-origin"] == PAGE
    assert requested.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert requested.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
    assert requested.headers["access-control-max-age"] == "600"
    assert "access-control-allow-credentials" not in requested.headers
    assert [refused.status_code, served.status_code] == [401, 200]
    for reply in (refused, served):  # a page reads errors too
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (
            PAGE,
            "Origin",
        )
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        f"{PAGE}.evil.example",
        f"{PAGE}:8443",
        "null",
        "http://chat.example.com",
    ],
)
async def test_a_wrong_origin_is_never_echoed(rig, http, origin):
    allow(rig, allow_credentials=True)
    requested = await http.options(CHAT, headers=ASKED | {"origin": origin})
    reply = await http.post(CHAT, json=HELLO, headers={"origin": origin})

    assert (requested.status_code, requested.json()["error"]["code"]) == (403, "cors_not_allowed")
    assert "service.cors.allowedOrigins" in requested.json()["error"]["message"]
    # the browser keeps it from the page
    assert (reply.status_code, reply.headers["vary"]) == (200, "Origin")
    assert "access-control-allow-origin" not in {*requested.headers, *reply.headers}


async def test_every_origin_is_allowed_by_a_star_and_never_with_credentials(rig, http):
    allow(rig, allowed_origins=["*"])
    requested = await http.options(CHAT, headers=ASKED)

    assert requested.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in requested.headers


async def test_credentials_are_allowed_to_named_origins_where_the_policy_says_so(rig, http):
    allow(rig, allow_credentials=True)
    replies = [
        await http.options(CHAT, headers=ASKED),
        await http.post(CHAT, json=HELLO, headers={"origin": PAGE}),
    ]

    assert [reply.headers["access-control-allow-credentials"] for reply in replies] == [
        "true",
        "true",
    ]


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (
            {"access-control-request-method": "PATCH"},
            "method 'PATCH' is not allowed for pages of other origins: add it to service.cors",
        ),
        ({"access-control-request-method": "GET"}, "allowedMethods"),
        (
            {"access-control-request-headers": "Authorization, x-other"},
            "header 'x-other' is not allowed",
        ),
    ],
)
async def test_a_preflight_for_more_than_is_allowed_says_what_is_missing(
    rig, http, requested, words
):
    allow(rig, allowed_methods=["POST"], allowed_headers=["Authorization"], max_age_seconds=5)
    right = await http.options(
        CHAT, headers=ASKED | {"access-control-request-headers": "authorization"}
    )
    wrong = await http.options(
        CHAT, headers=ASKED | {"access-control-request-headers": "authorization"} | requested
    )

    assert (
        right.status_code,
        right.headers["access-control-allow-headers"],
        right.headers["access-control-max-age"],
    ) == (
        200,
        "Accept, Accept-Language, Authorization, Content-Language, Content-Type",
        "5",
    )
    assert wrong.status_code == 403
    assert words in wrong.json()["error"]["message"]


async def test_a_preflight_is_answered_on_every_path_and_other_options_are_not(rig, wire):
    allow(rig)
    statuses = [
        (await wire.options(path, headers=ASKED)).status_code
        for path in ("/v1/models", "/nothing", CHAT)
    ]

    assert statuses == [200, 200, 200]
    assert (await wire.options(CHAT, headers={"origin": PAGE})).status_code == 405
    assert (await wire.get("/v1/models")).status_code == 200


async def test_streams_and_errors_of_the_door_can_be_read_by_the_page(rig, wire):
    allow(rig)
    streamed = await wire.post(CHAT, json=HELLO | {"stream": True}, headers={"origin": PAGE})
    too_large = await wire.post(CHAT, content=b" " * ((4 << 20) + 1), headers={"origin": PAGE})

    assert [reply.status_code for reply in (streamed, too_large)] == [200, 413]
    assert [reply.headers["access-control-allow-origin"] for reply in (streamed, too_large)] == [
        PAGE,
        PAGE,
    ]


async def test_a_change_of_the_policy_takes_effect_at_once(rig, http):
    assert (await http.options(CHAT, headers=ASKED)).status_code == 405
    allow(rig)
    assert (await http.options(CHAT, headers=ASKED)).status_code == 200
