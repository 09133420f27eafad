"""Plain data as text: block YAML with sorted keys, and texts of several lines as they are."""

import json
from pathlib import Path
from typing import Any

import yaml

RECORDS = Path(__file__).parent / "records"
LARGE = 150
"""Characters from which an equal mapping is written once, and then by its anchor."""


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(content: Any) -> str:
    """As JSON has it; a large mapping that is there again is an alias of the first."""
    known: dict[str, Any] = {}

    def once(mapping: dict[str, Any]) -> Any:
        text = json.dumps(mapping, sort_keys=True)
        return known.setdefault(text, mapping) if len(text) >= LARGE else mapping

    plain = json.loads(json.dumps(content), object_hook=once)
    return yaml.dump(plain, Dumper=_Dumper, default_flow_style=None, width=1000)
