"""Arguments that a model writes as text take the types of the tool's schema, and are valid under
it; a validator that is not ours agrees.
"""

import json
import time
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from pdcluster_worker.server.text.events import Delta, assembled
from pdcluster_worker.server.tools.calls import Tool, typed
from pdcluster_worker.server.tools.registry import FORMS
from pdcluster_worker.server.tools.streamed_call import Numbering

BLUE = {"enum": ["blue", 3, None]}
DEFS = {
    "L": {"type": "integer"},
    "Color": {"enum": ["blue", "red"]},
    "Place": {"type": "object", "properties": {"near": {"$ref": "#/$defs/Place"}}},
    "Far": {"$ref": "#/$defs/L"},
    "Circle": {"$ref": "#/$defs/Circle"},
}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def given_by(parameters: dict[str, Any], output: str, pieces: list[str] | None = None) -> Any:
    """The arguments of a call of `f`, as `qwen3_coder` reads them."""
    tools = {"f": Tool("f", parameters, is_strict=True)}
    parser = FORMS["qwen3_coder"].parser(tools, Numbering(lambda: "call"))
    parts = [part for piece in pieces or [output] for part in parser.feed(piece)]
    answer = assembled([Delta(0, (*parts, *parser.end()), finish_reason="stop")])
    assert [call.name for call in answer.tool_calls] == ["f"]
    return json.loads(answer.tool_calls[0].arguments)


def call_of(written: dict[str, str]) -> str:
    inner = "".join(f"<parameter={name}>{text}</parameter>\n" for name, text in written.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (ref("L"), "\n\n1\n", 1),
        (ref("Far"), "1", 1),
        ({"allOf": [ref("L")]}, "\n1\n", 1),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "1", 1),
        ({"anyOf": [ref("L"), {"type": "null"}]}, "\n1\n", 1),
        ({"anyOf": [ref("L"), {"type": "null"}]}, "\nnull\n", None),
        ({"anyOf": [ref("L"), {"type": "null"}]}, "None", None),
        ({"oneOf": [{"const": 1}, {"const": "a"}]}, "1", 1),
        (BLUE, "\n\nblue\n\n", "blue"),
        (BLUE, '"blue"', "blue"),
        (BLUE, "3", 3),
        (BLUE, "null", None),
        (BLUE, "green", "green"),
        ({"const": True}, "true", True),
        ({"enum": ["\nblue\n"]}, "\nblue\n", "\nblue\n"),
        (ref("Color") | {"default": "red"}, "\r\nblue\r\n", "blue"),
        ({"type": "string", "enum": ["blue"]}, "\n\nblue\n\n", "blue"),
        ({"type": "string", "format": "date"}, "\n\n2026-01-02 \n", "2026-01-02"),
        ({"type": "string", "pattern": "^[a-z]+$"}, " \nab\n", "ab"),
        ({"type": "string", "maxLength": 2}, "\n\nab\n\n", "ab"),
        ({"type": "string", "minLength": 3}, "\nab", "\nab"),
        ({"anyOf": [{"const": "\n"}, {"type": "string", "pattern": "^a"}]}, "\n", "\n"),
        ({"type": "string"}, "\n\n  a\n\n", "\n  a\n"),
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "\nFALSE\n", False),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array", "items": {"type": "string"}}, "\n['a']\n", ["a"]),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        (ref("Place"), '\n{"near": {"near": {}}}\n', {"near": {"near": {}}}),
        ({"properties": {"a": ref("L")}}, '{"a": 1}', {"a": 1}),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": ["number", "string"]}, "1.50", "1.50"),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["integer", "string"]}, '"12"', '"12"'),
        ({"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string"}]}, "1", "1"),
        ({"anyOf": [{"type": "array"}, {"const": "x"}]}, "['a']", ["a"]),
        ({"type": ["array", "string"]}, "['a']", ["a"]),
        ({"type": ["array", "string"]}, "(a) or [b]", "(a) or [b]"),
        ({"type": ["object", "string"], "pattern": "^{"}, "{'a': None}", {"a": None}),
        ({}, "\n1\n", "1"),
        ({}, "null", None),
        (True, "1", "1"),
        (False, "1", "1"),
        ({"description": "anything"}, "[1]", "[1]"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer", "minimum": 5}, "1", 1),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, '["\\ud800"]', '["\\ud800"]'),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "integer"}, "...", "..."),
        ({"type": "integer"}, "'\\d'", "'\\d'"),
        (ref("Circle"), "1", "1"),
        (ref("nowhere"), "1", "1"),
        ({"$ref": "http://elsewhere/x"}, "1", "1"),
        ({"allOf": [ref("Circle"), {"type": "integer"}]}, "1", 1),
    ],
)
def test_values_take_the_types_of_the_resolved_schema(schema, text, value) -> None:
    parameters = {"type": "object", "$defs": DEFS, "properties": {"x": schema}}

    found = given_by(parameters, call_of({"x": text}))
    assert found == {"x": value}
    assert type(found["x"]) is type(value)


@pytest.mark.parametrize(
    ("parameters", "written", "expected"),
    [
        ({"$ref": "#/$defs/Args"}, {"a": "1"}, {"a": 1}),
        ({"allOf": [{"$ref": "#/$defs/Args"}, {"properties": {"b": BLUE}}]}, {"b": "3"}, {"b": 3}),
        ({"additionalProperties": {"type": "integer"}}, {"a": "1"}, {"a": 1}),
        ({"patternProperties": {"^a": {"type": "integer"}}}, {"a": "1"}, {"a": "1"}),
        (
            {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
            {"a": "1"},
            {"a": 1},
        ),
        (
            {
                "oneOf": [
                    {"properties": {"kind": {"const": "n"}, "v": {"type": "integer"}}},
                    {"properties": {"kind": {"const": "s"}, "v": {"type": "string"}}},
                ]
            },
            {"kind": "s", "v": "1"},
            {"kind": "s", "v": "1"},
        ),
    ],
)
def test_arguments_are_looked_up_wherever_the_schema_has_them(
    parameters, written, expected
) -> None:
    args = {"properties": {"a": {"type": "integer"}}}
    whole = {"type": "object", "$defs": {"Args": args}, **parameters}

    assert given_by(whole, call_of(written)) == expected


class Color(Enum):
    BLUE = "blue"
    RED = "red"


class Place(BaseModel):
    name: str
    near: "Place | None" = None


class Trip(BaseModel):
    color: Color
    to: Place
    days: Literal[1, 2]
    on: date
    stops: list[Place] = []
    note: Annotated[str, Field(max_length=5)] | None = None
    weights: dict[str, float] = {}


def test_a_pydantic_model_takes_the_arguments_of_its_own_schema() -> None:
    written = {
        "color": "\n\nblue\n",
        "to": '\n{"name": "Rome", "near": {"name": "Ostia"}}\n',
        "days": "\n2\n",
        "on": "\n\n2026-01-02\n",
        "stops": "[{'name': 'Pisa', 'near': None}]",
        "note": "\n\nshort\n\n",
        "weights": '{"a": 1}',
    }
    found = given_by(Trip.model_json_schema(), call_of(written))

    assert Trip.model_validate_json(json.dumps(found), strict=True) == Trip(
        color=Color.BLUE,
        to=Place(name="Rome", near=Place(name="Ostia")),
        days=2,
        on=date(2026, 1, 2),
        stops=[Place(name="Pisa")],
        note="short",
        weights={"a": 1.0},
    )


def test_a_long_list_takes_no_type_from_the_arguments_after_it() -> None:
    whole = {"type": "integer"}
    parameters = {"properties": {"a": {"type": "array", "items": whole}, "b": whole}}
    long = list(range(10_000))

    assert typed({"a": json.dumps(long), "b": "1"}, parameters) == {"a": long, "b": 1}


SPACE = st.sampled_from(["", "\n", " \n", "\n\n"])
TEXT = st.text(alphabet="ab1 \n'\"{[-.é\\", max_size=6)


def _scalars() -> st.SearchStrategy[tuple[Any, Any]]:
    """A schema, and a value that it takes."""
    whole = st.integers(-50, 50)
    return st.one_of(
        whole.map(lambda n: ({"type": "integer", "minimum": n - 3, "maximum": n + 3}, n)),
        whole.map(lambda n: ({"type": "number", "exclusiveMaximum": n + 1}, n + 0.5)),
        st.booleans().map(lambda value: ({"type": "boolean"}, value)),
        st.just(({"type": "null"}, None)),
        TEXT.map(lambda text: ({"type": "string"}, text)),
        TEXT.map(lambda t: ({"type": "string", "minLength": len(t), "maxLength": len(t)}, t)),
        st.sampled_from(["ab", "b1"]).map(lambda t: ({"pattern": "^[ab1]+$", "type": "string"}, t)),
        st.one_of(whole, st.booleans(), st.none(), TEXT).map(
            lambda value: ({"const": value}, value)
        ),
        st.lists(st.one_of(whole, st.booleans(), TEXT), min_size=1, max_size=3).map(
            lambda values: ({"enum": values}, values[0])
        ),
    )


def _wider(inner: st.SearchStrategy[tuple[Any, Any]]) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.one_of(
        inner.map(lambda one: ({"type": "array", "items": one[0]}, [one[1]])),
        inner.map(
            lambda one: (
                {"type": "object", "properties": {"p": one[0]}, "required": ["p"]},
                {"p": one[1]},
            )
        ),
        st.tuples(inner, inner).map(lambda two: ({"anyOf": [two[0][0], two[1][0]]}, two[0][1])),
        st.tuples(inner, inner).map(lambda two: ({"anyOf": [two[1][0], two[0][0]]}, two[0][1])),
        st.tuples(inner, inner).map(lambda two: ({"oneOf": [two[1][0], two[0][0]]}, two[0][1])),
        inner.map(lambda one: ({"allOf": [one[0], {"description": "x"}]}, one[1])),
    )


PAIRS = st.recursive(_scalars(), _wider, max_leaves=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_given_out_is_valid_under_the_tools_parameters(data) -> None:
    pairs = data.draw(st.lists(PAIRS, min_size=1, max_size=3))
    values = {f"k{number}": value for number, (_, value) in enumerate(pairs)}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {},
        "required": list(values),
        "$defs": {},
    }
    for name, (schema, _) in zip(values, pairs, strict=True):
        way = data.draw(st.sampled_from(["plain", "ref", "allOf"]))
        parameters["$defs"][name] = schema
        parameters["properties"][name] = {
            "plain": schema,
            "ref": ref(name),
            "allOf": {"allOf": [ref(name)], "title": "x"},
        }[way]
    validator = jsonschema_rs.Draft202012Validator(parameters)
    if not validator.is_valid(values):
        return  # two alternatives of a `oneOf` may both take it
    written = {name: data.draw(_written(value)) for name, value in values.items()}
    output = call_of(written)
    found = given_by(parameters, output)

    assert validator.is_valid(found), (parameters, written, found)
    assert given_by(parameters, output, list(output)) == found


def _written(value: Any) -> st.SearchStrategy[str]:
    """As a model writes a value: text as it is, on a line of its own or not."""
    if isinstance(value, str):
        around = SPACE if value.strip() == value else st.sampled_from(["", "\n"])
        return around.map(lambda space: f"{space}{value}{space}")
    form = st.sampled_from([json.dumps(value), json.dumps(value, indent=1), repr(value)])
    return st.tuples(SPACE, form, SPACE).map("".join)


def test_schemas_that_multiply_do_not_take_long() -> None:
    """Each definition refers to the next one twice."""
    definitions: dict[str, Any] = {
        f"d{number}": {"allOf": [ref(f"d{number + 1}")] * 2, "anyOf": [ref(f"d{number + 1}")] * 2}
        for number in range(30)
    }
    definitions["d30"] = {"type": "integer"}
    parameters = {"$defs": definitions, "properties": {"x": ref("d0")}, **ref("d0")}
    start = time.process_time()

    assert typed({"x": "1", "y": "2"}, parameters)["x"] == 1
    assert time.process_time() - start < 1.0
