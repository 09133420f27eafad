"""Constraints on an answer's form reach the engine as one constraint, or are a 400 that names the
field.
"""

from typing import Any

import pytest

from pdcluster_worker.errors import RequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
}


def by_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pair", "schema": schema, **more},
        }
    }


@pytest.mark.parametrize(
    ("requested", "param"),
    [
        (by_format(), "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
)
async def test_what_the_engine_cannot_compile_is_a_400_that_names_the_field(
    rig, http, requested, param
):
    rig.backend.error = RequestError("#/properties/b: no", param="constraint")
    path = "/v1/chat/completions"
    response = await http.post(path, json={**REQUESTS[path], **requested})

    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": f"{param}: #/properties/b: no",
        "type": "invalid_request_error",
        "param": param,
        "code": None,
    }


async def test_another_error_of_the_engine_stays_as_it_is(rig, http):
    rig.backend.error = RequestError("too long", param="messages")
    path = "/v1/chat/completions"
    response = await http.post(path, json={**REQUESTS[path], **by_format()})

    assert response.json()["error"]["message"] == "too long"


async def test_a_schema_that_is_too_large_is_a_400_with_the_limit(rig, http):
    rig.policy = type(rig.policy)()
    schema = {"enum": [f"value {number}" for number in range(12_000)]}
    response = await http.post(
        "/v1/completions", json={**REQUESTS["/v1/completions"], **by_format(schema)}
    )

    assert response.status_code == 400
    assert "at most 131072 are accepted" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
