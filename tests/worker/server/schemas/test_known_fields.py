"""Known fields that are not served: refused by name with the fix, or accepted without effect; one
table of both.
"""

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
