"""Two applications: one whose address serves the other's model too, and hands its requests on."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import DegradationSpec, SmallerModelSpec
from pdcluster_schema.routing import RacingSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http import handed_on
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.handed_on import HandedOn, _is_going
from pdcluster_worker.server.http.json_body import INLINE_BYTES
from pdcluster_worker.server.http.other_models import _renamed
from pdcluster_worker.server.http.run import HttpServer, serve
from tests.ports import free_port
from tests.worker.server.conftest import Rig, make_rig

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
FALLBACK = DegradationSpec(smaller_model=SmallerModelSpec(name="small"))
FULL = RequestError("the queue is full", status=503, code="queue_full", retry_after_seconds=7)


@pytest.fixture
async def small(model_folder: Path) -> AsyncIterator[tuple[Rig, HttpServer]]:
    rig = make_rig(model_folder)
    rig.backend.model_name, rig.backend.max_model_len = "small", 150
    rig.say("I am small.")
    rig.app = rig.make_app()
    server = await serve(rig.app, "127.0.0.1", 0, open_answers=rig.open_answers)
    yield rig, server
    rig.backend.gate.set()
    await server.close()


@pytest.fixture
def large(rig: Rig, small: tuple[Rig, HttpServer]) -> Rig:
    """Its address serves the small model too."""
    return serving(rig, small=f"127.0.0.1:{small[1].port}")


def serving(rig: Rig, **addresses: str) -> Rig:
    rig.policy = PolicyConfig(models=addresses, degradation=FALLBACK, allow_client_priority=True)
    return rig


Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def counted(until: Until, rig: Rig, name: str, **labels: str) -> None:
    """Wait until 1 is counted, once the answer has gone."""
    async with asyncio.timeout(10):
        await until(lambda: rig.value(f"pdcluster_{name}_total", **labels) == 1)


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "temperature": 0, **fields}


async def test_each_model_answers_by_its_name(
    large: Rig, wire: httpx.AsyncClient, until: Until
) -> None:
    answers = [(await wire.post(CHAT, json=body(name))) for name in ("tiny", "small")]

    assert [
        (each.json()["model"], each.json()["choices"][0]["message"]["content"]) for each in answers
    ] == [("tiny", "Hello, world!"), ("small", "I am small.")]
    assert [each.headers.get("x-pdcluster-model") for each in answers] == [None, "small"]
    assert "pdcluster" not in answers[1].json()
    await counted(until, large, "handed_on_requests", model="small", outcome="answered")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)
async def test_each_api_is_handed_on(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], path: str, fields: Any
) -> None:
    async with httpx.AsyncClient(trust_env=False) as direct:
        expected = await direct.post(
            f"http://127.0.0.1:{small[1].port}{path}", json={"model": "small", **fields}
        )

    answer = await wire.post(path, json={"model": "small", **fields})

    assert (answer.status_code, answer.json().keys()) == (200, expected.json().keys())
    assert not large.backend.calls


@pytest.mark.parametrize("size", [0, INLINE_BYTES])
@pytest.mark.parametrize(
    ("field", "encoding"),
    [
        *(("NaN", "utf-8"), ("1", "utf-8-sig"), ("1", "utf-16"), ("1", "utf-32")),
        ('"\\ud800"', "utf-8"),
    ],
)
async def test_a_body_that_the_own_model_takes_is_handed_on(
    large: Rig, wire: httpx.AsyncClient, field: str, encoding: str, size: int
) -> None:
    sent = json.dumps(body("small", ignored=0)).replace('"ignored": 0', f'"ignored": {field}')
    headers = {"content-type": "application/json"}

    content = (sent + " " * size).encode(encoding)
    answer = await wire.post(CHAT, content=content, headers=headers)

    assert (answer.status_code, answer.json()["model"]) == (200, "small")
    assert not large.backend.calls


@pytest.mark.parametrize("wrong", [b"[]", b"{", b'{"model": []}', b'{"model": {}}', b"\xff\xff"])
async def test_a_body_that_is_wrong_is_refused_here(
    large: Rig, wire: httpx.AsyncClient, wrong: bytes
) -> None:
    answer = await wire.post(CHAT, content=wrong, headers={"content-type": "application/json"})

    assert (answer.status_code, "x-pdcluster-model" in answer.headers) == (400, False)


async def test_a_streamed_answer_comes_as_it_is_made(
    large: Rig, client: openai.AsyncOpenAI, small: tuple[Rig, HttpServer]
) -> None:
    small[0].backend.hold_after = 3

    stream = await client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    first = [await anext(stream) for _ in range(3)]
    small[0].backend.gate.set()
    rest = [chunk async for chunk in stream]

    text = "".join(each.choices[0].delta.content or "" for each in (*first, *rest))
    assert text == "I am small."
    assert {each.model for each in (*first, *rest)} == {"small"}


async def test_models_are_listed_with_their_lengths(large: Rig, wire: httpx.AsyncClient) -> None:
    listed = (await wire.get("/v1/models")).json()["data"]
    one = (await wire.get("/v1/models/small")).json()

    assert [(each["id"], each["max_model_len"]) for each in listed] == [
        ("tiny", 200),
        ("small", 150),
    ]
    assert one == listed[1]


async def test_a_model_that_its_cluster_does_not_serve_is_not_listed(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    serving(large, other=f"127.0.0.1:{small[1].port}")

    listed = (await wire.get("/v1/models")).json()["data"]
    answer = await wire.post(CHAT, json=body("other"))

    assert [each["id"] for each in listed] == ["tiny"]
    assert answer.status_code == 404
    assert "'small'" in answer.json()["error"]["message"]


async def test_an_unknown_model_is_refused_with_the_names(
    large: Rig, wire: httpx.AsyncClient
) -> None:
    error = (await wire.post(CHAT, json=body("huge"))).json()["error"]

    assert error["code"] == "model_not_found"
    assert "use 'tiny' or another one that /v1/models lists" in error["message"]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_cluster_that_is_gone_is_listed_and_refused(
    rig: Rig, wire: httpx.AsyncClient, is_known: bool
) -> None:
    serving(rig, small=f"127.0.0.1:{free_port()}" if is_known else "")

    listed = (await wire.get("/v1/models")).json()["data"]
    answer = await wire.post(CHAT, json=body("small"))

    assert [each["id"] for each in listed] == ["tiny", "small"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
    assert answer.headers["retry-after"] == "1"


@pytest.fixture
async def mute() -> AsyncIterator[str]:
    """Address of a server that takes connections and answers nothing."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def impatient(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(handed_on, "GET_SECONDS", 0.2)
    rig.policy = rig.policy.model_copy(update={"stall_seconds": 1})
    return rig


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cluster_that_answers_nothing_at_all_is_given_up(
    rig: Rig, wire: httpx.AsyncClient, mute: str, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    impatient(serving(rig, small=mute), monkeypatch)

    answer = await asyncio.wait_for(wire.post(CHAT, json=body("small", stream=streams)), 10)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (504, "model_unavailable")
    assert f"{mute} answers nothing: not the request for 1 s, nor /health" in error["message"]
    assert answer.headers["retry-after"] == "1"


async def test_a_smaller_model_that_answers_nothing_leaves_the_refusal(
    rig: Rig, wire: httpx.AsyncClient, mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(serving(rig, small=mute), monkeypatch).backend.error = FULL

    answer = await asyncio.wait_for(wire.post(CHAT, json=body("tiny", priority="low")), 10)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")


async def test_a_cluster_that_answered_nothing_holds_no_later_refusal(
    rig: Rig, wire: httpx.AsyncClient, mute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(rig, small=mute).backend.error = FULL
    impatient(rig, monkeypatch)
    assert (await wire.post(CHAT, json=body("small"))).status_code == 504
    monkeypatch.setattr(HandedOn, "open", None)  # it is not called

    refused = await wire.post(CHAT, json=body("tiny", priority="low"))
    named = await wire.post(CHAT, json=body("small"))

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert (named.status_code, named.json()["error"]["code"]) == (504, "model_unavailable")
    assert f"{mute} answers nothing: not an earlier request" in named.json()["error"]["message"]


async def test_an_answer_that_takes_long_is_waited_for_while_its_cluster_lives(
    large: Rig,
    wire: httpx.AsyncClient,
    small: tuple[Rig, HttpServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient(large, monkeypatch)
    small[0].backend.hold_after = 0

    answering = asyncio.create_task(wire.post(CHAT, json=body("small")))
    await asyncio.sleep(2.5)
    small[0].backend.gate.set()

    assert (await asyncio.wait_for(answering, 10)).json()["model"] == "small"


async def test_a_request_is_handed_on_once(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], url: str
) -> None:
    """Each says that the other serves the model."""
    serving(small[0], ring=url.removeprefix("http://"))
    serving(large, ring=f"127.0.0.1:{small[1].port}")

    answer = await wire.post(CHAT, json=body("ring"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_keys_that_the_other_cluster_does_not_take_are_refused_by_it(
    rig: Rig, wire: httpx.AsyncClient, model_folder: Path, tmp_path: Path
) -> None:
    there = make_rig(model_folder)
    (tmp_path / "theirs").write_text("sk-theirs")
    app = there.make_app(tenant_of=ApiKeys(tmp_path).tenant_of)
    server = await serve(app, "127.0.0.1", 0, open_answers=there.open_answers)
    serving(rig, small=f"127.0.0.1:{server.port}")
    headers = {"authorization": "Bearer sk-ours"}

    answer = await wire.post(CHAT, json=body("small"), headers=headers)
    listed = await wire.get("/v1/models", headers=headers)
    await server.close()

    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["x-pdcluster-model"] == "small"
    assert [each["id"] for each in listed.json()["data"]] == ["tiny", "small"]


async def test_a_header_that_is_not_ascii_is_handed_on(large: Rig, wire: httpx.AsyncClient) -> None:
    headers = {b"user-agent": b"caf\xe9"}

    answer = await wire.post(CHAT, json=body("small"), headers=headers)
    listed = await wire.get("/v1/models", headers=headers)

    assert (answer.status_code, listed.status_code) == (200, 200)


async def test_a_body_of_many_levels_is_refused_as_without_other_models(
    large: Rig, wire: httpx.AsyncClient
) -> None:
    content = b'{"model": "tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"

    answer = await wire.post(CHAT, content=content, headers={"content-type": "application/json"})

    assert answer.status_code == 400


@pytest.mark.parametrize("code", ["draining", "not_ready"])
async def test_a_worker_that_goes_is_known_by_either_shape_of_an_error(code: str) -> None:
    header, content = {"x-pdcluster-error": code}, f'{{"error":{{"code":"{code}"}}}}'.encode()

    assert await _is_going(httpx2.Response(503, headers=header, content=b"{}"))
    assert await _is_going(httpx2.Response(503, content=content))
    assert not await _is_going(httpx2.Response(503, content=b'{"error":{"code":"queue_full"}}'))


async def test_an_error_in_anthropics_shape_has_its_code_in_a_header(
    large: Rig, wire: httpx.AsyncClient
) -> None:
    large.backend.error = RequestError("going", status=503, code="draining")

    answer = await wire.post(
        "/v1/messages", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
    )

    assert (answer.status_code, answer.headers["x-pdcluster-error"]) == (503, "draining")


async def test_a_client_that_leaves_ends_the_request_there(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    backend = small[0].backend
    backend.hold_after = 2

    asking = asyncio.create_task(wire.post(CHAT, json=body("small")))
    await asyncio.wait_for(backend.holding.wait(), 10)
    asking.cancel()

    await asyncio.wait_for(backend.cancelled.wait(), 10)


async def test_a_stream_that_breaks_off_ends_with_an_error(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    small[0].backend.hold_after = 2

    async with wire.stream("POST", CHAT, json=body("small", stream=True)) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        await asyncio.wait_for(small[0].backend.holding.wait(), 10)
        await small[1].close()
        rest = [line async for line in lines if line]

    assert '"code":"model_unavailable"' in rest[-1]
    assert "[DONE]" not in rest[-1]


async def test_the_smaller_model_answers_in_place_of_a_refusal(
    large: Rig, wire: httpx.AsyncClient, until: Until
) -> None:
    large.backend.error = FULL

    answer = await wire.post(CHAT, json=body("tiny", priority="low"))

    found = answer.json()
    assert (answer.status_code, found["model"]) == (200, "small")
    assert found["choices"][0]["message"]["content"] == "I am small."
    assert found["pdcluster"] == {"degraded": ["model=small"]}
    assert answer.headers["x-pdcluster-model"] == "small"
    assert answer.headers["x-pdcluster-degraded"] == "model=small"
    await counted(until, large, "qos_degraded", reason="model", priority="low")


@pytest.mark.parametrize("is_raced", [False, True])
async def test_usage_is_that_of_the_model_that_the_answer_names(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], is_raced: bool
) -> None:
    racing(large).backend.error = FULL
    fields: dict[str, Any] = {"pdcluster": {"race": "small"}} if is_raced else {"priority": "low"}
    options = {"stream": True, "stream_options": {"include_usage": True}}

    whole = (await wire.post(CHAT, json=body("tiny", **fields))).json()
    streamed = (await wire.post(CHAT, json=body("tiny", **fields, **options))).text
    direct = (await wire.post(CHAT, json=body("small"))).json()

    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[6:7] == "{"]
    (last,) = [each for each in events if each.get("usage")]
    assert {each["model"] for each in (whole, last)} == {"small"}
    assert whole["usage"] == last["usage"] == direct["usage"]
    assert whole["usage"]["completion_tokens"] == len("I am small.") + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_clients_are_shown_the_smaller_model_too(
    large: Rig, wire: httpx.AsyncClient, stream: bool
) -> None:
    large.backend.error = FULL
    fields = {"messages": MESSAGES, "max_tokens": 20, "priority": "low", "stream": stream}

    answer = await wire.post("/v1/messages", json={"model": "tiny", **fields})

    assert answer.headers["x-pdcluster-model"] == "small"
    assert '"model":"small"' in answer.text
    assert '"pdcluster":{"degraded":["model=small"]}' in answer.text


async def test_low_priority_of_a_tenant_and_what_is_left_of_times_go_along() -> None:
    given = body("tiny", pdcluster={"deadline_ms": 500, "race": "x"}, text="\u4f60\ud800")
    content = json.dumps(given).encode()

    found = json.loads(_renamed(content, "small", priority="low", passed_ms=200))

    expected = {**given, "model": "small", "priority": "low", "pdcluster": {"deadline_ms": 300}}
    assert found == expected
    assert json.loads(_renamed(content, "small"))["pdcluster"] == {"deadline_ms": 500}


async def test_a_refusal_stays_once_the_deadline_has_passed(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    large.backend.error = FULL
    fields = {"priority": "low", "pdcluster": {"deadline_ms": 0.001}}

    answer = await wire.post(CHAT, json=body("tiny", **fields))

    assert answer.status_code in (400, 503)
    assert not small[0].backend.calls


async def test_a_streamed_answer_of_the_smaller_model_says_so_at_once(
    large: Rig, client: openai.AsyncOpenAI
) -> None:
    large.backend.error = FULL

    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        extra_body={"priority": "low"},
    )
    chunks = [chunk.model_dump() async for chunk in stream]

    assert {chunk["model"] for chunk in chunks} == {"small"}
    assert chunks[0]["pdcluster"] == {"degraded": ["model=small"]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"priority": "high"},
        {"priority": "low", "pdcluster": {"smaller_model": False}},
        {"priority": "low", "logit_bias": {"65": 1}},
        {"priority": "low", "stop_token_ids": [65]},
    ],
)
async def test_a_refusal_stays_where_no_smaller_model_may_answer(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], fields: Any
) -> None:
    large.backend.error = FULL

    answer = await wire.post(CHAT, json=body("tiny", **fields))

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert not small[0].backend.calls


async def test_prompts_of_tokens_stay_with_their_tokenizer(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    large.backend.error = FULL
    fields = {"model": "tiny", "priority": "low", "max_tokens": 5}

    answers = [
        await wire.post("/v1/completions", json={**fields, "prompt": prompt})
        for prompt in ("Hi", [65, 66])
    ]

    assert [each.status_code for each in answers] == [200, 503]
    assert len(small[0].backend.calls) == 1


async def test_an_error_that_is_no_refusal_of_load_stays(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    large.backend.error = RequestError("no", status=429, code="tenant_requests")

    answer = await wire.post(CHAT, json=body("tiny", priority="low"))

    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tenant_requests")
    assert not small[0].backend.calls


async def test_the_refusal_is_the_models_own_where_the_smaller_one_refuses_too(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    large.backend.error = FULL
    small[0].backend.error = RequestError("small is full", status=503, code="queue_full")

    answer = await wire.post(CHAT, json=body("tiny", priority="low"))

    assert answer.json()["error"]["message"] == "the queue is full"
    assert large.value("pdcluster_handed_on_requests_total", model="small", outcome="refused") == 1
    assert large.value("pdcluster_qos_degraded_total", reason="model", priority="low") == 0


def racing(rig: Rig) -> Rig:
    racing = RacingSpec(models=True, max_ratio=1.0)
    rig.policy = rig.policy.model_copy(update={"racing": racing})
    return rig


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("winner", ["tiny", "small"])
async def test_of_a_race_the_client_gets_the_answer_that_begins_first(
    large: Rig,
    wire: httpx.AsyncClient,
    small: tuple[Rig, HttpServer],
    until: Until,
    winner: str,
    streams: bool,
) -> None:
    backends = {"tiny": racing(large).backend, "small": small[0].backend}
    for each in backends.values():
        each.hold_after = 0
    request = body("tiny", stream=streams, pdcluster={"race": "small"})

    running = asyncio.create_task(wire.post(CHAT, json=request))
    for each in backends.values():
        await asyncio.wait_for(each.holding.wait(), 10)
    backends.pop(winner).gate.set()
    answer = await running

    text = "".join(re.findall(r'"content":"([^"]*)"', answer.text))
    assert text == {"tiny": "Hello, world!", "small": "I am small."}[winner]
    assert set(re.findall(r'"model":"([^"]*)"', answer.text)) == {winner}
    assert ('"degraded":["model=small"]' in answer.text) == (winner == "small")
    (loser,) = backends.values()
    await asyncio.wait_for(loser.cancelled.wait(), 10)
    name = "first" if winner == "tiny" else "rival"
    await counted(until, large, "races", winner=name)


@pytest.mark.parametrize("refused", ["tiny", "small"])
async def test_one_that_refuses_leaves_the_race_to_the_other(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], refused: str
) -> None:
    racing(large)
    (large if refused == "tiny" else small[0]).backend.error = FULL

    answer = await wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"}))

    assert (answer.status_code, answer.json()["model"] != refused) == (200, True)


async def test_a_race_without_a_winner_ends_with_the_own_refusal(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    racing(large).backend.error = FULL
    small[0].backend.error = RequestError("small is full", status=503, code="queue_full")

    answer = await wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"}))

    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the queue is full")
    assert large.value("pdcluster_races_total", winner="none") == 1


async def test_an_own_error_after_the_first_token_is_kept_for_a_race_without_a_winner(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer], until: Until
) -> None:
    lost = RequestError("the worker is lost", status=500, code="decode_worker_lost")
    backend, rival = racing(large).backend, small[0].backend
    backend.error, backend.error_after = lost, 2
    rival.error, rival.error_after, rival.hold_after = FULL, 1, 0

    running = asyncio.create_task(wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"})))
    await asyncio.wait_for(rival.holding.wait(), 10)
    async with asyncio.timeout(10):
        await until(lambda: bool(backend.calls))
    await asyncio.sleep(0.5)
    rival.gate.set()
    answer = await running

    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the worker is lost")
    assert large.value("pdcluster_races_total", winner="none") == 1


async def test_the_trace_of_a_race_says_how_the_loser_ended(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    racing(large).backend.error = FULL
    refused = await raced(wire)
    large.backend.error, large.backend.hold_after = None, 0
    lost = await raced(wire)

    assert refused["race_lost"] == {
        "by": "first",
        "reason": "queue_full",
        "message": "the queue is full",
    }
    assert lost["race_lost"] == {"by": "first", "reason": "lost", "message": ""}
    assert lost["ended"]["reason"] == "cancelled"
    assert "error" not in lost["ended"]


async def raced(wire: httpx.AsyncClient) -> dict[str, Any]:
    """Facts of the events of a race, by name."""
    answer = await wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"}))
    path = f"/debug/requests/{answer.headers['x-request-id']}"
    async with asyncio.timeout(10):
        while (found := await wire.get(path)).status_code != 200:
            await asyncio.sleep(0.02)
    (trace,) = found.json()["journeys"]
    return {event["name"]: event["facts"] for event in trace["events"]}


async def test_a_client_that_leaves_a_race_ends_both(
    large: Rig, wire: httpx.AsyncClient, small: tuple[Rig, HttpServer]
) -> None:
    backends = [racing(large).backend, small[0].backend]
    for each in backends:
        each.hold_after = 0

    running = asyncio.create_task(wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"})))
    for each in backends:
        await asyncio.wait_for(each.holding.wait(), 10)
    running.cancel()

    for each in backends:
        await asyncio.wait_for(each.cancelled.wait(), 10)


async def test_only_a_share_of_requests_races(
    large: Rig,
    wire: httpx.AsyncClient,
    small: tuple[Rig, HttpServer],
    until: Until,
) -> None:
    racing(large)
    large.policy = large.policy.model_copy(
        update={"racing": RacingSpec(models=True, max_ratio=0.5)}
    )
    small[0].backend.hold_after = 0

    for _ in range(4):
        await wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"}))

    async with asyncio.timeout(10):  # it is counted once the other run has ended
        await until(lambda: large.value("pdcluster_races_total", winner="first") >= 2)
    assert large.value("pdcluster_races_total", winner="first") == 2


@pytest.mark.parametrize(
    ("race", "fields", "words"),
    [
        ("huge", {}, "'huge' is no model to race on here"),
        ("small", {"logit_bias": {"65": 1}}, "without token ids or pdcluster.route"),
    ],
)
async def test_a_race_that_is_not_possible_is_refused(
    large: Rig, wire: httpx.AsyncClient, race: str, fields: Any, words: str
) -> None:
    racing(large)

    answer = await wire.post(CHAT, json=body("tiny", pdcluster={"race": race}, **fields))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "pdcluster.race")
    assert words in error["message"]


async def test_a_race_is_refused_where_the_policy_has_none(
    large: Rig, wire: httpx.AsyncClient
) -> None:
    answer = await wire.post(CHAT, json=body("tiny", pdcluster={"race": "small"}))

    assert answer.status_code == 400
    assert "set routing.racing.models" in answer.json()["error"]["message"]
