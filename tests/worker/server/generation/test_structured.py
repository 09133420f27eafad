"""Constraints on an answer's form reach the engine as one constraint, or are a 400 that names the
field.
"""

import json
from typing import Any

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import Constraint

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
WRITTEN = json.dumps(SCHEMA, separators=(",", ":"))
OBJECT = Constraint("json_object")
BY_SCHEMA = Constraint("json_schema", WRITTEN)
TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
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
    ("requested", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        (by_format(), BY_SCHEMA),
        (
            by_format(strict=True, description="Two fields"),
            Constraint("json_schema", WRITTEN, strict=True),
        ),
        (by_format(True), Constraint("json_schema", "true")),
        (
            {"response_format": {"type": "structural_tag", "format": TAG}},
            Constraint(
                "structural_tag",
                json.dumps({"type": "structural_tag", "format": TAG}, separators=(",", ":")),
            ),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA, indent=2)}}, BY_SCHEMA),
        ({"structured_outputs": {"regex": "[ab]+"}}, Constraint("regex", "[ab]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Constraint("choice", '["yes","no"]')),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            Constraint("grammar", 'root ::= "a"'),
        ),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"structural_tag": "{}"}}, Constraint("structural_tag", "{}")),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": WRITTEN}, BY_SCHEMA),
        ({"guided_regex": "[ab]+"}, Constraint("regex", "[ab]+")),
        ({"guided_choice": ["yes", "no"]}, Constraint("choice", '["yes","no"]')),
        ({"guided_grammar": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"')),
        (
            {"response_format": {"type": "text"}, "guided_regex": "[ab]+"},
            Constraint("regex", "[ab]+"),
        ),
    ],
)
@pytest.mark.parametrize("path", REQUESTS)
async def test_both_apis_hand_the_constraint_to_every_choice(
    rig, http, path, requested, constraint
):
    response = await http.post(path, json={**REQUESTS[path], "n": 2, **requested})

    assert response.status_code == 200, response.text
    (specs, _), *_ = rig.backend.calls
    assert [spec.sampling.constraint for spec in specs] == [constraint, constraint]


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
