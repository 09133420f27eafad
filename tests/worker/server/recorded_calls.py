"""Outputs of models with calls of the tools in `TOOLS`, from `recorded_calls.yaml`."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from pdcluster_worker.server.tools.calls import Tool
from pdcluster_worker.server.tools.registry import ParserName

TOOLS = {
    "get_weather": Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "where": {"type": "object"},
            },
        },
    ),
    "now": Tool("now"),
}
HERMES_PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@dataclass(frozen=True)
class Recorded:
    """A model's output; text: what of it is no call."""

    parser: ParserName
    output: str
    calls: tuple[tuple[str, dict[str, object]], ...] = ()
    text: str = ""


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

RECORDED = [
    Recorded(
        parser,
        row["output"],
        tuple((name, arguments) for name, arguments in row["calls"]),
        row.get("text", ""),
    )
    for parser, rows in _FILE["recorded"].items()
    for row in rows
]
MALFORMED = [
    *(
        Recorded(parser, output)
        for parser, outputs in _FILE["malformed"].items()
        for output in outputs
    ),
    Recorded("hermes", "<tool_call>" + "[" * 50_000),
    Recorded("pythonic", "[" * 3000),
]
