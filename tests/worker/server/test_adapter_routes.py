"""Adapters that are loaded and unloaded by HTTP: what reaches the engine, the answers, and what
is refused before.
"""

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.respond import cache_salt
from pdcluster_worker.server.openai.own_front_end import OwnFrontEnd

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = {"lora_name": "sql", "lora_path": "team/sql"}


async def test_an_adapter_is_loaded_and_unloaded_by_name(rig, http):
    loaded = await http.post(LOAD, json=SQL)
    left = await http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 3})

    assert (loaded.status_code, loaded.json()) == (
        200,
        {"lora_name": "sql", "fingerprint": "weights of team/sql", "bytes": 100, "free_bytes": 200},
    )
    assert (left.status_code, left.json()["free_bytes"]) == (200, 300)
    assert rig.backend.adapters_called == [("load", "sql", "team/sql"), ("unload", "sql")]


async def test_the_refusal_of_an_engine_is_the_answer(rig, http):
    rig.backend.adapter_error = RequestError(
        "adapter 'sql' is not loaded here", status=404, code="adapter_not_found"
    )
    response = await http.post(UNLOAD, json={"lora_name": "sql"})

    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "sql"}, "lora_path"),
        (LOAD, {**SQL, "lora_path": ""}, "lora_path"),
        (LOAD, {**SQL, "lora_name": "two words"}, "lora_name"),
        (LOAD, {**SQL, "lora_name": "x" * 129}, "lora_name"),
        (UNLOAD, {}, "lora_name"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(rig, http, path, body, param):
    response = await http.post(path, json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not rig.backend.adapters_called


async def test_the_name_of_the_model_is_taken(rig, http):
    response = await http.post(LOAD, json={**SQL, "lora_name": "tiny"})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "lora_name: 'tiny' is the name of a model here: choose another one"
    )


async def test_one_that_is_unloaded_while_its_prompt_is_read_is_unknown(rig):
    class Unloading(OwnFrontEnd):
        async def completion(self, *arguments):
            rig.backend.adapters = {}
            return await super().completion(*arguments)

    rig.backend.adapters = {"sql": "f" * 64}
    async with rig.client(front_end=Unloading()) as http:
        response = await http.post("/v1/completions", json={"model": "sql", "prompt": [1, 2]})

    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert not rig.backend.calls


async def test_the_fingerprint_goes_with_requests_and_into_their_salt(rig, http):
    rig.backend.adapters = {"law": "", "sql": "f" * 64}
    body = {"prompt": [1, 2], "max_tokens": 1}
    for name in ("tiny", "law", "sql"):
        assert (await http.post("/v1/completions", json={"model": name, **body})).is_success
    specs = [spec for (spec,), _ in rig.backend.calls]

    assert [(spec.adapter, spec.adapter_weights) for spec in specs] == [
        ("", ""),
        ("law", ""),
        ("sql", "f" * 64),
    ]
    assert [spec.cache_salt for spec in specs] == [
        b"",
        cache_salt(b"", None, shared=False, adapter="law"),
        cache_salt(b"", None, shared=False, adapter="sql", weights="f" * 64),
    ]
    others = cache_salt(b"", None, shared=False, adapter="sql", weights="0" * 64)
    assert len({spec.cache_salt for spec in specs} | {others}) == 4
