"""Watch the children of all PDClusters: each event into the cache, its PDCluster into the queue. A
watch goes on from the list that filled the cache; where that version is gone, it lists again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import (
    ClusterError,
    GoneError,
    NotFoundError,
    UnavailableError,
    error_of,
)
from pdcluster_api.apiserver.kinds import CHILDREN, PDCLUSTER, POD, Body, Key, Kind
from pdcluster_operator.informer.cache import Cache, Name, name_of
from pdcluster_schema import labels
from pdcluster_schema.backoff import Backoff
from pdcluster_schema.quick_json import decoded, encoded

SILENCE_SECONDS = 70.0  # Silence of a watch that is taken for dead

# Time after which the API server ends a watch: another one may go to another API server
SERVER_SECONDS = 240

_TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")


@dataclass(frozen=True)
class WatchEvent:
    """One event.  version: from which a watch goes on after it."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    body: Body

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])


@dataclass(frozen=True)
class Selection:
    """Objects of a kind, in a namespace or (None) in all, with some labels."""

    kind: Kind
    namespace: str | None = None
    labels: str = ""


async def watch(
    client: ApiClient, what: Selection, since: str, silence_seconds: float = SILENCE_SECONDS
) -> AsyncIterator[WatchEvent]:
    """Events after a version, until the API server ends the watch.  Raises GoneError when that
    version is too old, UnavailableError when the watch breaks or is silent.
    """
    query = {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": since,
        "timeoutSeconds": str(SERVER_SECONDS),
        **({"labelSelector": what.labels} if what.labels else {}),
    }
    async for line in client.lines(what.kind, what.namespace, query, silence_seconds):
        yield _event(line)


def _event(line: bytes) -> WatchEvent:
    """One line.  Raises the error that it says, and UnavailableError for what is no event."""
    try:
        found = decoded(line)
        kind, body = found["type"], found["object"]
    except (ValueError, KeyError, TypeError) as e:
        raise UnavailableError("a line of a watch is no event; is there a proxy between?") from e
    if kind not in _TYPES:
        raise error_of(int(body.get("code") or 500), encoded(body), {})
    return WatchEvent(kind, body)


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


logger = logging.getLogger(__name__)
RETRY = Backoff(first=1.0, most=10.0)
# Failures in a row that the API server answered, after which the kind is listed again: it may never
# take that version again, as after a restore of its etcd
FAILURES_TO_LIST = 5

ABSENT_SECONDS = 60.0  # Time after which an optional kind that was absent is listed again


@dataclass
class Watches:
    client: ApiClient  # without a bound on its connections: each watch has one of its own
    listing: ObjectLister
    cache: Cache
    add: Callable[[Key], None]  # enqueues a PDCluster
    silence_seconds: float = SILENCE_SECONDS
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for what in self.listing.selections([POD, *CHILDREN]):
                group.create_task(self._follow(what), name=f"watch of {what.kind}")

    async def _follow(self, what: Selection) -> None:
        version, num_failures = self.listing.versions.get(what), 0
        while True:
            try:
                if version is None and (version := await self._list(what)) is None:
                    await self.sleep(ABSENT_SECONDS)
                    continue
                async for event in watch(self.client, what, version, self.silence_seconds):
                    self._learn(what, event)
                    version, num_failures = event.version, 0
                    # what has arrived by then comes without a turn of the others
                    await asyncio.sleep(0)
            except GoneError:
                logger.info("watch too old, listed again kind=%s", what.kind)
                version, num_failures = None, num_failures + 1
            except ClusterError as e:
                logger.info("watch broken off kind=%s error=%s", what.kind, e)
                num_failures += 1
                is_refused = e.code and num_failures % FAILURES_TO_LIST == 0
                if is_refused or is_absent(what.kind, e):
                    version = None
            # one that ended in peace, too: an API server that ends each at once is not hurried
            await self.sleep(RETRY.after(max(1, num_failures)))

    async def _list(self, what: Selection) -> str | None:
        """List a kind again; returns the version of the list, None of a kind that is not there."""
        before, listed = self._known(what), set[Name]()
        async for body in self.listing.of(what):
            listed.add(name_of(what.kind.name, body))
            self._add(self.cache.put(what.kind.name, body))
        now = self._known(what)
        for name, version in before.items():
            if name not in listed and now.get(name) == version:
                self._add(self.cache.forget(name))
        return self.listing.versions.get(what)

    def _known(self, what: Selection) -> dict[Name, object]:
        return {
            name: version
            for name, version in self.cache.versions(what.kind.name).items()
            if what.namespace in (None, name.namespace)
        }

    def _learn(self, what: Selection, event: WatchEvent) -> None:
        body: Body = event.body
        if event.type == "DELETED":
            self._add(self.cache.remove(what.kind.name, body))
        elif event.type != "BOOKMARK":
            self._add(self.cache.put(what.kind.name, body))

    def _add(self, key: Key | None) -> None:
        if key is not None:
            self.add(key)
