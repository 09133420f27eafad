"""The JSON schemas within a structural tag, made as those that stand alone are (`schema`); one with
`strict: true` strictly.
"""

import json
from typing import Any

from pdcluster_worker.structured_output.schema import prepare


def prepared_tag(text: str, most_white_space: int) -> str:
    """A structural tag to compile.

    Raises SchemaError for a schema in it, ValueError for what is no JSON.

    >>> tag = {"format": {"type": "json_schema", "json_schema": {"multipleOf": 2,
    ...     "type": "integer"}}}
    >>> print(prepared_tag(json.dumps(tag), 9))
    {"format": {"type": "json_schema", "json_schema": {"type": "integer"}, "max_whitespace_cnt": 9}}
    """
    return json.dumps(_prepared(json.loads(text), most_white_space))


def _prepared(node: Any, most_white_space: int) -> Any:
    if isinstance(node, list):
        return [_prepared(item, most_white_space) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") != "json_schema" or "json_schema" not in node:
        return {name: _prepared(value, most_white_space) for name, value in node.items()}
    is_json = node.get("style", "json") == "json"
    strict = node.get("strict") is True
    others = {name: value for name, value in node.items() if name != "strict"}
    made = {
        **others,
        "json_schema": prepare(node["json_schema"], strict=strict, is_json=is_json).schema,
    }
    return (
        made | {"max_whitespace_cnt": node.get("max_whitespace_cnt", most_white_space)}
        if is_json
        else made
    )
