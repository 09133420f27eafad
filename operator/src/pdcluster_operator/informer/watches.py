"""Watch the children of all PDClusters: each event into the cache, its PDCluster into the queue. A
watch goes on from the list that filled the cache; where that version is gone, it lists again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, GoneError
from pdcluster_api.apiserver.kinds import CHILDREN, POD, Body, Key
from pdcluster_api.apiserver.watch import SILENCE_SECONDS, Selection, WatchEvent, watch
from pdcluster_operator.informer.cache import Cache, Name, name_of
from pdcluster_operator.informer.listing import ObjectLister, is_absent
from pdcluster_schema.backoff import Backoff

logger = logging.getLogger(__name__)
RETRY = Backoff(first=1.0, most=10.0)
# Failures in a row that the API server answered, after which the kind is listed again: it may never
# take that version again, as after a restore of its etcd
FAILURES_TO_LIST = 5

ABSENT_SECONDS = 60.0  # Time after which an optional kind that was absent is listed again


@dataclass
class Watches:
    """The watches of pods and of every kind of children."""

    client: ApiClient  # without a bound on its connections: each watch has one of its own
    listing: ObjectLister
    cache: Cache
    add: Callable[[Key], None]  # enqueues a PDCluster
    silence_seconds: float = SILENCE_SECONDS
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        """Watch until cancelled."""
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
