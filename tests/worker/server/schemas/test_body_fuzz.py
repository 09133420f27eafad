"""Bodies that no client sends: every known field with every kind of value, right ones among wrong
ones, and never a 5xx.

`test_openapi_fuzz` goes by the document that the server publishes; this goes beyond it.  The seed
is fixed, so that a run of the suite is the same as the one before.
"""

import asyncio
import json

import httpx
import pytest
from clients_table import table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest

BOUNDED = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [
            "",
            "none",
            "auto",
            "required",
            "f",
            "text",
            "a\ud800",
            "{}",
            "(a|b",
            "root ::= root",
            "x" * 2000,
            "\x00",
        ]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)

MESSAGES = st.lists(
    st.one_of(
        JSON,
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(
                    ["user", "system", "developer", "assistant", "tool", "function"]
                )
            },
            optional={
                "content": st.one_of(SCALARS, st.just([{"type": "text", "text": "a"}]), JSON),
                "tool_calls": st.one_of(st.just([CALL]), JSON),
                "tool_call_id": st.one_of(st.just("c1"), JSON),
                "name": SCALARS,
                "reasoning_content": SCALARS,
            },
        ),
    ),
    max_size=3,
)
LIKELY = {
    "messages": MESSAGES,
    "tools": st.one_of(st.just([TOOL]), st.just([TOOL, TOOL]), st.lists(JSON, max_size=2)),
    "tool_choice": st.one_of(
        st.sampled_from(["none", "auto", "required"]),
        st.just({"type": "function", "function": {"name": "f"}}),
        JSON,
    ),
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.builds(
            lambda schema: {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            st.one_of(st.just(SCHEMA), JSON),
        ),
        JSON,
    ),
    "structured_outputs": st.one_of(
        st.builds(
            lambda name, value: {name: value},
            st.sampled_from(["json", "regex", "choice", "grammar", "structural_tag"]),
            JSON,
        ),
        st.just({"regex": "[0-9]+", "choice": ["a"]}),
        JSON,
    ),
    "stream": st.booleans(),
    "stream_options": st.one_of(st.just({"include_usage": True}), JSON),
    "n": st.one_of(st.sampled_from([1, 2, 16, 128, 129, 0]), JSON),
    "max_tokens": st.one_of(st.sampled_from([1, 5, 199, 200, 0]), JSON),
    "chat_template_kwargs": st.one_of(st.dictionaries(st.text(max_size=5), JSON, max_size=2), JSON),
    "prompt": st.one_of(st.sampled_from(["a", ["a", "b"], [1, 2], [[1], [2]]]), JSON),
}


def bodies(schema, required: dict[str, object]):
    """Bodies that are right but for up to three fields, and some that miss what is required."""
    names = st.sampled_from(sorted({*table(schema), "nobody_defined_this"} - {"model"}))
    field = names.flatmap(
        lambda name: st.tuples(st.just(name), LIKELY.get(name, JSON) if name in LIKELY else JSON)
    )
    fields = st.lists(field, max_size=3).map(dict)
    return st.builds(
        lambda some, whole: ({"model": "tiny"} | required if whole else {"model": "tiny"}) | some,
        fields,
        st.integers(0, 9),
    )


@pytest.mark.parametrize(
    ("path", "schema", "required"),
    [
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", CompletionRequest, {"prompt": "a"}),
    ],
)
def test_no_body_is_answered_5xx(rig, path, schema, required):
    rig.say("{}")
    statuses: dict[int, int] = {}

    async def post(body: object) -> httpx.Response:
        transport = httpx.ASGITransport(rig.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(
                path, content=json.dumps(body), headers={"content-type": "application/json"}
            )

    with asyncio.Runner() as runner:

        @given(body=bodies(schema, required))
        @BOUNDED
        def check(body):
            reply = runner.run(post(body))
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            assert reply.status_code in (200, 400, 413), reply.text
            if reply.status_code != 200:
                assert reply.json()["error"]["message"]

        check()
    assert statuses[200] > 5  # some of it gets through
    assert statuses[400] > 5
