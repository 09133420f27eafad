"""Known fields that are not served: refused by name with the fix, or accepted without effect; one
table of both.
"""

import json

import pytest
from clients_table import Known, table

from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest

HELLO = [{"role": "user", "content": "Hi"}]
APIS = [("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)]


async def ask(http, path: str, **fields):
    body = {"model": "tiny", "messages": HELLO, "prompt": "a", "max_tokens": 2}
    return await http.post(path, json=body | fields)


@pytest.mark.parametrize(("path", "schema"), APIS)
async def test_every_refused_field_is_named_with_the_fix(rig, http, path, schema):
    refused = {name: known for name, known in table(schema).items() if known.kind == "refused"}
    assert len(refused) > 30
    for name, known in refused.items():
        error = (await ask(http, path, **{name: {"no": "such value"}})).json()["error"]

        assert error["param"] == name
        assert error["message"] == f"{name}: is not supported here: {known.note}"
    assert rig.backend.calls == []


@pytest.mark.parametrize(("path", "schema"), APIS)
@pytest.mark.parametrize("value", [True, "priority", {"a": ["b"]}, 3.5])
async def test_every_hint_is_taken_whatever_it_says(rig, http, path, schema, value):
    hints = [name for name, known in table(schema).items() if known.kind == "ignored"]
    assert len(hints) > 10
    reply = await ask(http, path, **dict.fromkeys(hints, value))

    assert reply.status_code == 200
    assert len(rig.backend.calls) == 1


def test_the_table_tells_served_refused_and_ignored_fields_apart():
    known = table(ChatRequest)

    assert known["temperature"] == Known("served")
    assert known["store"] == Known("ignored", "nothing is stored")
    assert known["verbosity"].kind == "ignored"
    assert known["early_stopping"] == Known(
        "refused", "leave it out or set it to False; there is no beam search"
    )
    assert "verbosity" not in table(CompletionRequest)


BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_the_fields_that_changed_nothing(rig, http, path, stream):
    body = BODIES[path] | {"model": "tiny", "stream": stream}
    wrong = body | {"max_tokns": 2, "topp": None}
    reply, clean = [await http.post(path, json=each) for each in (wrong, body)]

    assert (reply.status_code, clean.status_code) == (200, 200)
    names = reply.headers["x-pdcluster-ignored"].split(", ")
    assert set(names) - {"stream"} == {"max_tokns"}  # tokens and counts are never streamed
    assert "max_tokns" not in clean.headers.get("x-pdcluster-ignored", "")


async def test_hints_are_named_as_ignored_too(rig, http):
    reply = await ask(http, "/v1/chat/completions", user="me", store=None, verbosity="low")

    assert reply.headers["x-pdcluster-ignored"] == "prompt, user, verbosity"


async def test_a_refusal_names_the_ignored_fields_of_a_body_that_could_be_read(rig, http):
    reply = await ask(http, "/v1/chat/completions", model="huge", max_tokns=2)

    assert (reply.status_code, reply.headers["x-pdcluster-ignored"]) == (404, "prompt, max_tokns")


async def test_names_that_no_header_can_carry_are_escaped_and_cut(rig, http):
    odd = {"a\r\nb: c, d": 1, "\ud800ü": 1, "x" * 100: 1} | {f"f{i}": 1 for i in range(20)}
    body = {"model": "tiny", "prompt": "a"} | odd
    reply = await http.post(
        "/v1/completions",
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )

    names = reply.headers["x-pdcluster-ignored"].split(", ")
    assert names[:3] == ["a%0D%0Ab%3A%20c%2C%20d", "%3F%C3%BC", "x" * 64]
    assert (len(names), names[-2:]) == (17, ["f12", "..."])


async def test_ignored_names_are_no_longer_than_proxies_take(http):
    long = {chr(0x1F600 + number) * 64: 1 for number in range(16)}
    reply = await http.post("/v1/completions", json={"model": "tiny", "prompt": "a"} | long)

    names = reply.headers["x-pdcluster-ignored"]
    assert (len(names), names[:12], names[-3:]) == (2000, "%F0%9F%98%80", "...")
