"""Reader of the calls that Qwen3-Coder writes: elements for the function and each parameter.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value is text; the tool's schema says what it stands for (`typed`).  It may hold any text but
its own end, so that the other marks count only outside of it.
"""

import re
from collections.abc import Iterator, Sequence

from pdcluster_worker.server.tools.calls import Call, Tools, all_or_none, call_with
from pdcluster_worker.server.tools.typed import typed

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,256})>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>\s*", re.DOTALL)
_END = re.compile(r"</function>\s*")

Written = tuple[str, dict[str, str]]
"""A function's name, and its parameters as text."""


def read_qwen_coder(text: str, tools: Tools) -> Sequence[Call] | None:
    """The functions of one <tool_call> element, or what stands in one <function= element without
    it.

    Anything else beside them makes it no call.
    """
    if not text.lstrip().startswith("<function="):
        text = f"<function={text}</function>"
    return all_or_none([_call(written, tools) for written in _functions(text)])


def _functions(text: str) -> Iterator[Written | None]:
    """Functions one after the other; None where the text is anything else."""
    position = 0
    while position < len(text):
        head = _FUNCTION.match(text, position)
        if head is None:
            yield None
            return
        given: dict[str, str] = {}
        position = head.end()
        while (found := _PARAMETER.match(text, position)) is not None:
            if _is_unclosed(found[2]):
                yield None
                return
            given[found[1].strip()] = found[2]
            position = found.end()
        end = _END.match(text, position)
        if end is None:
            yield None
            return
        yield head[1].strip(), given
        position = end.end()


def _is_unclosed(value: str) -> bool:
    """Return whether a value has another function's parameter in it, since it was never closed."""
    end = value.find("</function>")
    return end >= 0 and value.find("<parameter=", end) >= 0


def _call(written: Written | None, tools: Tools) -> Call | None:
    tool = None if written is None else tools.get(written[0])
    if written is None or tool is None:
        return None
    return call_with(tool.name, typed(written[1], tool.parameters))
