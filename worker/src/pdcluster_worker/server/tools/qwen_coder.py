"""Reader of the calls that Qwen3-Coder writes: elements for the function and each parameter.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is text; the tool's schema says what it stands for.  One that does not
fit its type is kept as text, which is what the tool will complain of.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from pdcluster_worker.server.tools.calls import Call, Schema, Tools, all_or_none, call_with

_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL)


def read_qwen_coder(text: str, tools: Tools) -> Sequence[Call] | None:
    """The functions of one <tool_call> element, or what stands in one <function= element without
    it.

    Anything else beside them makes it no call.
    """
    if "<function=" not in text:
        text = f"<function={text}</function>"
    if _is_open(text, "function") or _FUNCTION.sub("", text).strip():
        return None
    return all_or_none(
        [_call(match[1].strip(), match[2], tools) for match in _FUNCTION.finditer(text)]
    )


def _call(name: str, body: str, tools: Tools) -> Call | None:
    tool = tools.get(name)
    if tool is None or _is_open(body, "parameter") or _PARAMETER.sub("", body).strip():
        return None
    properties = tool.parameters.get("properties", {})
    given = {match[1].strip(): _unwrapped(match[2]) for match in _PARAMETER.finditer(body)}
    return call_with(
        name, {key: _typed(value, properties.get(key)) for key, value in given.items()}
    )


def _is_open(text: str, name: str) -> bool:
    """Return whether an element has no end; looking for the end of each of many would take long."""
    return text.rfind(f"<{name}=") > text.rfind(f"</{name}>")


def _unwrapped(value: str) -> str:
    """Without the one line break that stands on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Schema | None) -> Any:
    kinds = _kinds(schema)
    if value.strip() == "null" and (not kinds or "null" in kinds):
        return None
    if not kinds or "string" in kinds:
        return value
    try:
        parsed = json.loads(value.lower() if kinds == {"boolean"} else value, strict=False)
    except (ValueError, RecursionError):
        return value
    return parsed


def _kinds(schema: Schema | None) -> set[str]:
    """The types that a schema names, also those of its alternatives; empty = any."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type", [])
    kinds = {named} if isinstance(named, str) else set(named)
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= _kinds(alternative)
    return kinds
