"""The parsers of calls by name, and which of them a model's chat template asks for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pdcluster_worker.config.worker import ToolParserName
from pdcluster_worker.server.text.events import Part
from pdcluster_worker.server.tools.call_readers import (
    read_hermes,
    read_llama,
    read_mistral,
    read_pythonic,
    read_qwen_coder,
)
from pdcluster_worker.server.tools.call_scanner import LeadingCalls, MarkedCalls, Marks
from pdcluster_worker.server.tools.calls import Reader, Tools
from pdcluster_worker.server.tools.closing import (
    JsonValues,
    NewValues,
    NoValues,
    ParameterValues,
)
from pdcluster_worker.server.tools.streamed_call import Numbering, StreamedForm

ParserName = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]


class CallParser(Protocol):
    def feed(self, text: str) -> Sequence[Part]:
        """Take more text; returns what is certain now."""
        ...

    def end(self) -> Sequence[Part]:
        """No more text: returns what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """marks: none = calls are the whole answer, which begins with one of `leads`.
    written: form of a call that the engine constrains, where its arguments are JSON text.
    """

    read: Reader
    marks: tuple[Marks, ...] = ()
    leads: tuple[str, ...] = ()
    markers: frozenset[str] = frozenset()
    new_values: NewValues = NoValues
    written: StreamedForm | None = None

    def parser(
        self, tools: Tools, numbering: Numbering, *, is_constrained: bool = False
    ) -> CallParser:
        """A new parser of this form.  is_constrained: no call can have another."""
        if self.marks:
            written = self.written if is_constrained else None
            return MarkedCalls(
                self.marks,
                self.read,
                tools,
                numbering,
                new_values=self.new_values,
                written=written,
            )
        return LeadingCalls(self.leads, self.read, tools, numbering)


_TOOL_CALL = Marks("<tool_call>", "</tool_call>")

FORMS: dict[ParserName, CallFormat] = {
    "hermes": CallFormat(
        read_hermes,
        (_TOOL_CALL,),
        markers=frozenset({"<tool_call>", "</tool_call>"}),
        new_values=JsonValues,
        written=StreamedForm(
            re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'),
            re.compile(r"\s*\}\s*</tool_call>"),
        ),
    ),
    "qwen3_coder": CallFormat(
        read_qwen_coder,
        (_TOOL_CALL, Marks("<function=", "</function>")),
        markers=frozenset({"<tool_call>", "</tool_call>"}),
        new_values=ParameterValues,
    ),
    "mistral": CallFormat(
        read_mistral,
        (Marks("[TOOL_CALLS]"),),
        markers=frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        new_values=JsonValues,
    ),
    "llama3_json": CallFormat(
        read_llama, leads=("{", "<|python_tag|>"), markers=frozenset({"<|python_tag|>"})
    ),
    "pythonic": CallFormat(
        read_pythonic,
        leads=("[", "<|python_start|>"),
        markers=frozenset({"<|python_start|>", "<|python_end|>"}),
    ),
}

_SIGNS: tuple[tuple[ParserName, tuple[str, ...]], ...] = (
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("pythonic", ("func_name1(",)),
)
"""Signs in a template that show the form of calls to the model: all signs of one line, the first
line that fits.
"""


def parser_for(name: ToolParserName, template: str) -> ParserName | None:
    """`auto`: by the text of the model's chat template; None = unknown."""
    if name == "none":
        return None
    if name == "qwen":
        return "hermes"  # Qwen2.5 and Qwen3 write as Hermes does
    if name != "auto":
        return name
    return next((found for found, signs in _SIGNS if all(sign in template for sign in signs)), None)
