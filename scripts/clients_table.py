"""Write the table of fields into docs/clients.md, from the request schemas; --check compares only."""

import re
import sys
from pathlib import Path

from pydantic import BaseModel

from pdcluster_worker.server.known_fields import Known, table
from pdcluster_worker.server.schemas import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"
SCHEMAS: dict[str, type[BaseModel]] = {"chat": ChatRequest, "completions": CompletionRequest}
_PART = re.compile(r"(<!-- fields:[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)

Row = tuple[str, Known, str]


def main() -> int:
    """Write, or compare; returns the exit status."""
    text = PAGE.read_text()
    wanted = with_fields(text)
    if "--check" in sys.argv:
        if text != wanted:
            print("docs/clients.md: its fields are not those of the schemas: run scripts/clients_table.py")
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


def with_fields(text: str) -> str:
    """The page with the fields as the schemas have them."""
    return _PART.sub(lambda part: f"{part[1]}{fields()}\n{part[2]}", text)


def fields() -> str:
    """What becomes of each field, in Markdown."""
    rows = list(_rows())
    served = [f"| {api} | {_names(rows, api)} |" for api in ("both", *SCHEMAS)]
    lines = ["| served by | fields |", "| --- | --- |", *served, ""]
    for kind, note in (("refused", "instead"), ("ignored", "since")):
        lines += [f"| {kind} | by | {note} |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {api} | {known.note} |" for name, known, api in rows if known.kind == kind]
        lines.append("")
    return "\n".join(lines[:-1])


def _names(rows: list[Row], api: str) -> str:
    return ", ".join(f"`{name}`" for name, known, of in rows if known.kind == "served" and of == api)


def _rows() -> list[Row]:
    """Each field once where both APIs say the same of it."""
    tables = {api: table(schema) for api, schema in SCHEMAS.items()}
    names = sorted({name for known in tables.values() for name in known})
    rows: list[Row] = []
    for name in names:
        found = {api: known[name] for api, known in tables.items() if name in known}
        if len(found) == len(tables) and len(set(found.values())) == 1:
            rows.append((name, next(iter(found.values())), "both"))
        else:
            rows += [(name, known, api) for api, known in found.items()]
    return rows


if __name__ == "__main__":
    sys.exit(main())
