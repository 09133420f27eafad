"""YAML text for files in ConfigMaps: the same value always gives the same text, in the order of the
fields.
"""

import json
from functools import lru_cache
from typing import Any

import yaml


def yaml_text(value: Any) -> str:
    """Block style, keys in the value's own order, no aliases.  value: of JSON's types."""
    return _text(json.dumps(value))


@lru_cache(maxsize=128)
def _text(value: str) -> str:
    """Remembered: every reconcile renders the files, and they rarely change."""
    return yaml.dump(json.loads(value), Dumper=_Dumper, sort_keys=False, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
