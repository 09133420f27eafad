"""The parts of kopf that it may move in any release: imported here, and nowhere else."""

from types import SimpleNamespace
from typing import Any

from kopf._cogs.clients import api
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from pdcluster_schema.quick_json import decoded


class NoMemories(ResourceMemories):
    """Keeps nothing: kopf stores some kilobytes per object for handlers that we do not use."""

    async def recall(self, raw_body: Any, **_: Any) -> ResourceMemory:
        return ResourceMemory()


def read_json_of_any_depth() -> None:
    """Let kopf read JSON as we do: by its own reader an object of some thousand levels, which any
    user may make, ends the operator.
    """
    reader = SimpleNamespace(loads=lambda line: decoded(line.encode()))
    vars(api).update(json=reader, get=_get)


async def _get(url: str, **options: Any) -> Any:
    response = await api.request(method="get", url=url, **options)
    async with response:
        return decoded(await response.read())
