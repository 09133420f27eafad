"""Everything that the cache holds, read from the API server: all kinds that exist there, in the namespaces that are watched."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from pdcluster_operator.api import labels
from pdcluster_operator.cluster.cache import Body, Name
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.errors import NotFoundError
from pdcluster_operator.cluster.kinds import CHILDREN, PDCLUSTER, POD

WATCHED = (PDCLUSTER, POD, *CHILDREN)
"""Every kind that is watched and cached."""

SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"
"""Of every child: the API server sends no other object of these kinds."""

_KIND_OF_NAME = {kind.name: kind for kind in WATCHED}


@dataclass
class Listing:
    """namespaces: None in it = all; present: names of the kinds that existed when they were last listed."""

    client: ApiClient
    namespaces: Sequence[str | None] = (None,)
    present: set[str] = field(default_factory=set)

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds."""
        return tuple(_KIND_OF_NAME)

    async def bodies(self, kind: str) -> AsyncIterator[Body]:
        """All objects of a kind; none when its optional CRD is not there."""
        found = _KIND_OF_NAME[kind]
        selector = "" if found == PDCLUSTER else SELECTOR
        try:
            for namespace in self.namespaces:
                async for body in self.client.list(found, namespace, labels=selector):
                    yield body
        except NotFoundError:
            self.present.discard(kind)
            if not found.optional:
                raise
        else:
            self.present.add(kind)

    async def body(self, name: Name) -> Body | None:
        """One object; None when there is none, or it is not ours any more."""
        body = await self.client.find(_KIND_OF_NAME[name.kind], name.namespace, name.name)
        is_ours = body is not None and (name.kind == PDCLUSTER.name or _managed_by(body) == labels.FIELD_MANAGER)
        return body if is_ours else None


def _managed_by(body: Body) -> str | None:
    managed_by: str | None = body["metadata"].get("labels", {}).get(labels.MANAGED_BY)
    return managed_by
