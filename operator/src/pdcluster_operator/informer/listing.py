"""List all objects of the cache: all kinds, in the namespaces that are watched."""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, NotFoundError
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER, POD, Body, Kind
from pdcluster_api.apiserver.watch import Selection
from pdcluster_operator.informer.cache import Name
from pdcluster_schema import labels

WATCHED = (PDCLUSTER, POD, *CHILDREN)  # Every kind that is watched and cached

# Label of every child: the API server sends no other object of these kinds
SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"

_KIND_OF_NAME = {kind.name: kind for kind in WATCHED}


@dataclass(frozen=True)
class ObjectLister:
    """Lists of all kinds.  namespaces: None in it = all"""

    client: ApiClient
    namespaces: Sequence[str | None] = (None,)
    # of the last whole list of each selection, from which a watch of it goes on
    versions: dict[Selection, str] = field(default_factory=dict)

    @property
    def kinds(self) -> Sequence[str]:
        return tuple(_KIND_OF_NAME)

    def selections(self, kinds: Iterable[Kind]) -> list[Selection]:
        return [
            Selection(kind, namespace, "" if kind == PDCLUSTER else SELECTOR)
            for kind in kinds
            for namespace in self.namespaces
        ]

    async def bodies(self, kind: str) -> AsyncIterator[Body]:
        for what in self.selections([_KIND_OF_NAME[kind]]):
            async for body in self.of(what):
                yield body

    async def of(self, what: Selection) -> AsyncIterator[Body]:
        """All objects of a selection; notes the version of the list at its end.  An optional kind
        that is absent has no objects, and its list no version.
        """
        version = ""
        self.versions.pop(what, None)
        try:
            async for page in self.client.pages(what.kind, what.namespace, labels=what.labels):
                version = page.version
                for body in page.items:
                    yield body
        except ClusterError as e:
            if not is_absent(what.kind, e):
                raise
            return
        self.versions[what] = version

    async def body(self, name: Name) -> Body | None:
        """One object; None when there is none, or it is not ours any more."""
        kind = _KIND_OF_NAME[name.kind]
        body = await self.client.find(kind, name.namespace, name.name)
        is_ours = body is not None and (
            name.kind == PDCLUSTER.name or _managed_by(body) == labels.FIELD_MANAGER
        )
        return body if is_ours else None


def is_absent(kind: Kind, error: ClusterError) -> bool:
    """Return whether an error says that the API server lacks an optional kind, or that the roles
    of an older chart, which do not know it, give no right to it.
    """
    return kind.is_optional and (isinstance(error, NotFoundError) or error.code == 403)


def _managed_by(body: Body) -> str | None:
    managed_by: str | None = body["metadata"].get("labels", {}).get(labels.MANAGED_BY)
    return managed_by
