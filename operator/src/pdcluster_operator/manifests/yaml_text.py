"""YAML text for files in ConfigMaps: the same value always gives the same text, in the order that a person would write."""

from typing import Any

import yaml


def yaml_text(value: Any) -> str:
    """Block style, keys in the value's own order, no aliases."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
