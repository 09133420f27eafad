"""List all objects of the cache: all kinds, in the namespaces that are watched."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER, POD
from pdcluster_api.schema import labels
from pdcluster_operator.informer.cache import Name

WATCHED = (PDCLUSTER, POD, *CHILDREN)
"""Every kind that is watched and cached."""

SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"
"""Label of every child: the API server sends no other object of these kinds."""

_KIND_OF_NAME = {kind.name: kind for kind in WATCHED}


@dataclass(frozen=True)
class Listing:
    """Lists of all kinds.  namespaces: None in it = all"""

    client: ApiClient
    namespaces: Sequence[str | None] = (None,)

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds."""
        return tuple(_KIND_OF_NAME)

    async def bodies(self, kind: str) -> AsyncIterator[Body]:
        """All objects of a kind."""
        found = _KIND_OF_NAME[kind]
        selector = "" if found == PDCLUSTER else SELECTOR
        for namespace in self.namespaces:
            async for body in self.client.list(found, namespace, labels=selector):
                yield body

    async def body(self, name: Name) -> Body | None:
        """One object; None when there is none, or it is not ours any more."""
        kind = _KIND_OF_NAME[name.kind]
        body = await self.client.find(kind, name.namespace, name.name)
        is_ours = body is not None and (
            name.kind == PDCLUSTER.name or _managed_by(body) == labels.FIELD_MANAGER
        )
        return body if is_ours else None


def _managed_by(body: Body) -> str | None:
    managed_by: str | None = body["metadata"].get("labels", {}).get(labels.MANAGED_BY)
    return managed_by
