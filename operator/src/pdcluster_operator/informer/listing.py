"""List all objects of the cache: all kinds that exist, in the namespaces that are watched."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ForbiddenError, NotFoundError
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER, POD, Kind
from pdcluster_api.schema import labels
from pdcluster_operator.informer.cache import Name

logger = logging.getLogger(__name__)

WATCHED = (PDCLUSTER, POD, *CHILDREN)
"""Every kind that is watched and cached."""

SELECTOR = f"{labels.MANAGED_BY}={labels.FIELD_MANAGER}"
"""Of every child: the API server sends no other object of these kinds."""

_KIND_OF_NAME = {kind.name: kind for kind in WATCHED}


@dataclass
class Listing:
    """Lists of all kinds; optional ones that were forbidden at first stay out, as no watch covers
    them.

    namespaces: None in it = all
    present:    names of the kinds that existed when they were last listed
    forbidden:  names of the optional kinds that may not be listed, and whether they existed when
                last checked
    """

    client: ApiClient
    namespaces: Sequence[str | None] = (None,)
    present: set[str] = field(default_factory=set)
    forbidden: dict[str, bool] = field(default_factory=dict)

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds."""
        return tuple(_KIND_OF_NAME)

    async def bodies(self, kind: str) -> AsyncIterator[Body]:
        """All objects of a kind; none of an absent optional one.

        Raises ForbiddenError where it may not.
        """
        found = _KIND_OF_NAME[kind]
        if kind in self.forbidden:
            self.forbidden[kind] = await self.client.serves(found)
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
        else:
            self.present.add(kind)

    async def body(self, name: Name) -> Body | None:
        """One object; None when there is none, or it is not ours any more."""
        kind = _KIND_OF_NAME[name.kind]
        body = await self.client.find(kind, name.namespace, name.name)
        is_ours = body is not None and (name.kind == PDCLUSTER.name or _managed_by(body) == labels.FIELD_MANAGER)
        return body if is_ours else None

    async def forbid(self, kind: str, error: ForbiddenError) -> None:
        """Do without a kind.

        Raises the error again if it is not optional, or the login failed (401).
        """
        found = _KIND_OF_NAME[kind]
        if not found.optional or error.code == HTTPStatus.UNAUTHORIZED:
            raise error
        self.forbidden[kind] = await self.client.serves(found)
        logger.warning("not made, the right is missing kind=%s error=%s; give it and restart the operator", kind, error)

    def watched(self) -> tuple[Kind, ...]:
        """The kinds to watch: a watch that is refused would end all of them."""
        return tuple(kind for kind in WATCHED if kind.name not in self.forbidden)


def _managed_by(body: Body) -> str | None:
    managed_by: str | None = body["metadata"].get("labels", {}).get(labels.MANAGED_BY)
    return managed_by
