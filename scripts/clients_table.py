"""Write the table of fields into docs/http.md, from the request schemas; --check
compares only.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from pdcluster_worker.server.anthropic.schemas import MessagesRequest
from pdcluster_worker.server.http.json_body import Ignored
from pdcluster_worker.server.responses.schemas import ResponsesRequest
from pdcluster_worker.server.schemas.fields import Only
from pdcluster_worker.server.schemas.requests import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[1] / "docs" / "http.md"
SCHEMAS: dict[str, type[BaseModel]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
_PART = re.compile(r"(<!-- fields:[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Known:
    """Treatment of one field.  note: reason or fix, empty where there is none."""

    kind: Literal["served", "refused", "ignored"]
    note: str = ""


def table(schema: type[BaseModel]) -> dict[str, Known]:
    """Every field of a request schema, by name."""
    return {name: _known(field.metadata) for name, field in schema.model_fields.items()}


def _known(metadata: list[Any]) -> Known:
    for marker in metadata:
        if isinstance(marker, Only):
            return Known("refused", marker.advice)
        if isinstance(marker, Ignored):
            return Known("ignored", marker.reason)
    return Known("served")


def main() -> int:
    """Write, or compare; returns the exit status."""
    text = PAGE.read_text()
    wanted = with_fields(text)
    if "--check" in sys.argv:
        if text != wanted:
            print(
                "docs/http.md: its fields are not those of the schemas: run "
                "scripts/clients_table.py"
            )
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


def with_fields(text: str) -> str:
    """The page with the fields as the schemas have them."""
    return _PART.sub(lambda part: f"{part[1]}{fields()}\n{part[2]}", text)


def fields() -> str:
    """Table of all fields and their treatment, in Markdown."""
    tables = {api: table(schema) for api, schema in SCHEMAS.items()}
    lines = ["| endpoint | fields that it serves |", "| --- | --- |"]
    for api, known in tables.items():
        served = sorted(name for name, each in known.items() if each.kind == "served")
        lines.append(f"| {api} | {', '.join(f'`{name}`' for name in served)} |")
    for kind, note in (("refused", "instead"), ("ignored", "since")):
        lines += ["", f"| {kind} | by | {note} |", "| --- | --- | --- |", *_rows(tables, kind)]
    return "\n".join(lines)


def _rows(tables: dict[str, dict[str, Known]], kind: str) -> list[str]:
    """One for each field and note, with the endpoints that have both."""
    by: dict[tuple[str, str], list[str]] = {}
    for api, known in tables.items():
        for name, each in known.items():
            if each.kind == kind:
                by.setdefault((name, each.note), []).append(api)
    return [
        f"| `{name}` | {', '.join(apis)} | {note} |" for (name, note), apis in sorted(by.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
