"""Each request that was accepted ends with one line of figures, without a text of the user."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from pdcluster_schema.log_lines import FORMATTERS
from pdcluster_worker.errors import RequestError
from pdcluster_worker.tracing.request_trace import ENDED, add_event
from tests.worker.server.conftest import Rig

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "secret words"}]}


@pytest.fixture
def ended(caplog: pytest.LogCaptureFixture) -> Any:
    """The fields of the only line of an end."""
    caplog.set_level("INFO", logger="pdcluster_worker")

    def fields() -> dict[str, Any]:
        (found,) = [record for record in caplog.records if hasattr(record, "fields")]
        lines = [FORMATTERS["text"].format(record) for record in caplog.records]
        assert found.getMessage() == "ended"
        assert "secret" not in "".join(lines)
        return vars(found)["fields"]

    return fields


@pytest.mark.parametrize("stream", [False, True])
async def test_end_of_an_answer_has_its_tokens_times_and_place(
    http: httpx.AsyncClient, rig: Rig, ended: Any, stream: bool
) -> None:
    script, rig.backend.place = rig.backend.script, "remote"

    def placed(spec: Any) -> list[int]:
        add_event("decode_worker", worker="here")
        add_event("credit", peer="prefill/p0", waited_seconds=0.0)
        add_event("context_end", prefill="remote", cached_tokens=16)
        return script(spec)

    rig.backend.script = placed
    answer = await http.post(
        CHAT, json={**BODY, "stream": stream}, headers={"x-request-id": "mine"}
    )
    found = ended()

    assert answer.status_code == 200
    assert found["request"] in answer.text
    assert found["label"] == "mine"
    assert (found["model"], found["choices"]) == ("tiny", 1)
    assert found["prompt_tokens"] == len(rig.spec.prompt)
    assert (found["completion_tokens"], found["cached_tokens"]) == (14, 16)
    assert 0 <= found["itl_seconds"] <= found["seconds"]
    assert 0 <= found["ttft_seconds"] <= found["seconds"]
    assert found["reason"] == "stop"
    assert (found["prefill"], found["prefill_worker"]) == ("remote", "prefill/p0")
    assert found["decode_worker"] == "here"


async def test_several_choices_are_one_line(http: httpx.AsyncClient, rig: Rig, ended: Any) -> None:
    await http.post(CHAT, json={**BODY, "n": 2, "max_tokens": 3})
    found = ended()

    assert (found["choices"], found["completion_tokens"], found["reason"]) == (2, 6, "length")


@pytest.mark.parametrize(
    ("place", "peers", "worker"),
    [
        ("remote", ["prefill/p0", "prefill/p0"], "prefill/p0"),
        ("remote", ["prefill/p0", "prefill/p1"], None),
        ("remote", ["prefill/p0", ""], None),
        ("remote", ["", ""], None),
        ("local", ["prefill/p0", "prefill/p0"], None),
    ],
)
async def test_place_of_several_choices_is_the_header_s(
    http: httpx.AsyncClient,
    rig: Rig,
    ended: Any,
    *,
    place: Any,
    peers: list[str],
    worker: str | None,
) -> None:
    script, rig.backend.place, given = rig.backend.script, place, iter(peers)

    def placed(spec: Any) -> list[int]:
        add_event("credit", peer=next(given), waited_seconds=0.0)
        other = "local" if place == "remote" else "remote"
        add_event("context_end", prefill=other, cached_tokens=0)
        return script(spec)

    rig.backend.script = placed
    answer = await http.post(CHAT, json={**BODY, "n": 2})
    found = ended()

    assert found["prefill"] == answer.headers["x-pdcluster-prefill"] == place
    assert found.get("prefill_worker") == worker


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_end_by_an_error_names_it(
    http: httpx.AsyncClient, rig: Rig, ended: Any, stream: bool, after: int
) -> None:
    rig.backend.error = RequestError("no room", status=503, code="queue_full")
    rig.backend.error_after = after
    await http.post(CHAT, json={**BODY, "stream": stream})
    found = ended()
    (trace,) = (await http.get(f"/debug/requests/{found['request']}")).json()["journeys"]
    (facts,) = [event["facts"] for event in trace["events"] if event["name"] == ENDED]

    assert facts["error"] == "queue_full"
    assert (found["reason"], found["completion_tokens"]) == ("queue_full", after)
    assert ("ttft_seconds" in found) == bool(after)


async def test_end_by_a_bug_is_an_internal_error(
    http: httpx.AsyncClient, rig: Rig, ended: Any
) -> None:
    rig.backend.error = ZeroDivisionError()

    assert (await http.post(CHAT, json=BODY)).status_code == 500
    assert ended()["reason"] == "internal_error"


async def test_end_by_a_client_that_leaves_says_so(
    wire: httpx.AsyncClient, rig: Rig, ended: Any
) -> None:
    rig.backend.hold_after = 3
    leaving = asyncio.create_task(wire.post(CHAT, json={**BODY, "stream": True}))
    async with asyncio.timeout(10):
        await rig.backend.holding.wait()
        leaving.cancel()
        await rig.backend.cancelled.wait()
        await asyncio.sleep(0)

    assert ended()["reason"] == "disconnected"


async def test_refused_before_it_was_accepted_has_no_line(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await http.post(CHAT, content=json.dumps({**BODY, "model": "other"}))

    assert "ended" not in caplog.text
