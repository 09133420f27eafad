"""YAML text for files in ConfigMaps: the same value always gives the same text, in the order of the
fields.
"""

import json
import re
from functools import lru_cache
from typing import Any

import yaml

_OWN_WAYS = re.compile(r'\\|"":|"[^"]{100,}":')
"""In JSON: characters that it escapes, an empty key, a long key.  These libyaml writes otherwise
than PyYAML's own emitter does; a file of a running pod must not change.
"""


def yaml_text(value: Any) -> str:
    """Block style, keys in the value's own order, no aliases.  value: of JSON's types."""
    return _text(json.dumps(value))


@lru_cache(maxsize=128)
def _text(value: str) -> str:
    """Remembered: every reconcile renders the files, and they rarely change."""
    dumper = _Dumper if _OWN_WAYS.search(value) else _QuickDumper
    return yaml.dump(json.loads(value), Dumper=dumper, sort_keys=False, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


# The base is looked up, since PyYAML may be built without libyaml, and mypy knows no such base.
class _QuickDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same text, by libyaml where PyYAML has it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
