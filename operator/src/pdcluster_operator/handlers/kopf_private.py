"""The parts of kopf that it may move in any release: imported here, and nowhere else.

`tests/operator/pdcluster_operator/handlers/test_kopf_private.py` fails when they are moved or
called otherwise.
"""

from typing import Any

from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory


class NoMemories(ResourceMemories):
    """Keeps nothing: kopf stores some kilobytes for every object, for handlers that we do not
    use.
    """

    async def recall(self, raw_body: Any, **_: Any) -> ResourceMemory:
        """A fresh record."""
        return ResourceMemory()
