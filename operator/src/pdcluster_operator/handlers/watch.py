"""Watch events: into the cache, and the PDCluster that they are about into the work queue.

One low-level handler for every kind, so kopf adds no finalizer, no annotation
and no retries of its own.  An event that brings nothing new adds nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import kopf

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_operator.informer.cache import Cache


@dataclass(frozen=True)
class Watch:
    """add: enqueues a key; listed: called when a watch had to list again, and may have missed
    deletions.
    """

    cache: Cache
    add: Callable[[Key], None]
    listed: Callable[[], None]

    async def on_event(self, *, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        """Take in one event.  param: the kind."""
        if event["type"] is None:
            self.listed()
        learn = self.cache.remove if event["type"] == "DELETED" else self.cache.put
        key = learn(param, event["object"])
        if key is not None:
            self.add(key)


def register(registry: kopf.OperatorRegistry, kinds: Iterable[Kind], watch: Watch) -> None:
    """Let kopf watch every kind."""
    for kind in kinds:
        kopf.on.event(
            kind.api_version, kind.plural, registry=registry, id=kind.plural, param=kind.name
        )(watch.on_event)
