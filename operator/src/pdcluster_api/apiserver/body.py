"""An object as the API server has it, and the key of a PDCluster."""

from typing import Any, NamedTuple

Body = dict[str, Any]


class Key(NamedTuple):
    """Namespace and name of a PDCluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
