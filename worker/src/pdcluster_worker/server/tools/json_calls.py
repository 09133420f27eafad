"""Readers of calls that are written as JSON objects: Hermes' and Qwen's, Llama's, Mistral's."""

import json
import re
from collections.abc import Sequence
from typing import Any

from pdcluster_worker.server.tools.calls import Call, Tools, all_or_none, call_of, object_of

_DECODER = json.JSONDecoder(strict=False)
_GAP = re.compile(r"[\s;,]*")
_NAMED = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
"""Never goes back: a model may write any amount of white space here."""


def read_hermes(text: str, tools: Tools) -> Sequence[Call] | None:
    """Read the text between <tool_call> and </tool_call>: {"name": ..., "arguments": {...}}."""
    call = call_of(object_of(text), tools)
    return None if call is None else [call]


def read_llama(text: str, tools: Tools) -> Sequence[Call] | None:
    """A whole answer of one or more {"name": ..., "parameters": {...}}, with semicolons or line
    breaks between them.
    """
    values = _objects(text.replace("<|python_tag|>", "", 1))
    return None if values is None else all_or_none([call_of(value, tools) for value in values])


def read_mistral(text: str, tools: Tools) -> Sequence[Call] | None:
    """Read the text after [TOOL_CALLS]: a JSON array of calls, or since v11 name[ARGS]{...}."""
    if (named := _NAMED.match(text)) is not None:
        call = call_of({"name": named[1], "arguments": text[named.end() :]}, tools)
        return None if call is None else [call]
    values = _objects(text)
    if values is None:
        return None
    calls = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return all_or_none([call_of(value, tools) for value in calls])


def _objects(text: str) -> list[Any] | None:
    """The JSON values that the text is a row of; None where it is anything else."""
    values, position = [], _after_gap(text, 0)
    while position < len(text):
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        position = _after_gap(text, position)
    return values


def _after_gap(text: str, position: int) -> int:
    gap = _GAP.match(text, position)
    return position if gap is None else gap.end()
