"""Everything that the cache holds, read from the API server: all kinds that exist there, in the namespaces that are watched."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from pdcluster_operator.api import labels
from pdcluster_operator.cluster.cache import Body, Name
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.errors import ForbiddenError, NotFoundError
from pdcluster_operator.cluster.kinds import CHILDREN, PDCLUSTER, POD, Kind

logger = logging.getLogger(__name__)

WATCHED = (PDCLUSTER, POD, *CHILDREN)
"""Every kind that is watched and cached."""

SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"
"""Of every child: the API server sends no other object of these kinds."""

_KIND_OF_NAME = {kind.name: kind for kind in WATCHED}


@dataclass
class Listing:
    """Optional kinds that we have no right to are as those that do not exist, for the life of the process: no watch tells of them.

    namespaces: None in it = all
    present:    names of the kinds that existed when they were last listed
    forbidden:  names of the optional kinds that may not be listed
    """

    client: ApiClient
    namespaces: Sequence[str | None] = (None,)
    present: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds."""
        return tuple(_KIND_OF_NAME)

    async def bodies(self, kind: str) -> AsyncIterator[Body]:
        """All objects of a kind; none when it is optional, and not there or forbidden."""
        found = _KIND_OF_NAME[kind]
        if kind in self.forbidden:
            return
        selector = "" if found == PDCLUSTER else SELECTOR
        try:
            for namespace in self.namespaces:
                async for body in self.client.list(found, namespace, labels=selector):
                    yield body
        except NotFoundError:
            self.present.discard(kind)
            if not found.optional:
                raise
        except ForbiddenError as e:
            self._forbid(found, e)
        else:
            self.present.add(kind)

    async def body(self, name: Name) -> Body | None:
        """One object; None when there is none, or it is not ours any more."""
        kind = _KIND_OF_NAME[name.kind]
        if kind.name in self.forbidden:
            return None
        try:
            body = await self.client.find(kind, name.namespace, name.name)
        except ForbiddenError as e:
            self._forbid(kind, e)
            return None
        is_ours = body is not None and (name.kind == PDCLUSTER.name or _managed_by(body) == labels.FIELD_MANAGER)
        return body if is_ours else None

    def watched(self) -> tuple[Kind, ...]:
        """The kinds to watch: a watch that is refused would end all of them."""
        return tuple(kind for kind in WATCHED if kind.name not in self.forbidden)

    def _forbid(self, kind: Kind, error: ForbiddenError) -> None:
        """Raises the error again for a kind that is not optional."""
        self.present.discard(kind.name)
        if not kind.optional:
            raise error
        self.forbidden.add(kind.name)
        logger.warning("not made, for the right is missing kind=%s error=%s; give it and restart the operator", kind, error)


def _managed_by(body: Body) -> str | None:
    managed_by: str | None = body["metadata"].get("labels", {}).get(labels.MANAGED_BY)
    return managed_by
