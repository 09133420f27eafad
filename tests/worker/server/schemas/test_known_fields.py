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
    assert {
        "regex",
        "ebnf",
        "stop_regex",
        "lora_path",
        "use_beam_search",
        "length_penalty",
        "logits_processors",
    } <= refused.keys()
    for name, known in refused.items():
        error = (await ask(http, path, **{name: {"no": "such value"}})).json()["error"]

        assert error["param"] == name
        assert error["message"] == f"{name}: is not supported here: {known.note}"
    assert rig.backend.calls == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "lora_path",
            "a",
            "leave it out or set it to []; serve the merged model as a PDCluster of its own, and "
            "name it in model",
        ),
        ("truncate_prompt_tokens", 5, "leave it out; shorten the prompt before it is sent"),
        ("extra_body", {"top_k": 3}, "its fields go beside the others"),
        ("audio", {"voice": "a"}, "this server answers with text"),
    ],
)
async def test_a_refused_field_says_what_to_do_instead(http, name, value, words):
    error = (await ask(http, "/v1/chat/completions", **{name: value})).json()["error"]

    assert words in error["message"]


@pytest.mark.parametrize(("path", "schema"), APIS)
@pytest.mark.parametrize("value", [True, "priority", {"a": ["b"]}, 3.5])
async def test_every_hint_is_taken_whatever_it_says(rig, http, path, schema, value):
    hints = [name for name, known in table(schema).items() if known.kind == "ignored"]
    assert {
        "store",
        "service_tier",
        "metadata",
        "user",
        "safety_identifier",
        "prompt_cache_key",
    } <= set(hints)
    reply = await ask(http, path, **dict.fromkeys(hints, value))

    assert reply.status_code == 200
    assert len(rig.backend.calls) == 1


async def test_a_field_of_no_api_is_ignored(http):
    assert (
        await ask(http, "/v1/chat/completions", nobody_defined_this={"a": [1]})
    ).status_code == 200


def test_the_table_tells_served_refused_and_ignored_fields_apart():
    known = table(ChatRequest)

    assert known["temperature"] == Known("served")
    assert known["store"] == Known("ignored", "nothing is stored")
    assert known["verbosity"].kind == "ignored"
    assert known["early_stopping"] == Known(
        "refused", "leave it out or set it to False; there is no beam search"
    )
    assert "verbosity" not in table(CompletionRequest)
