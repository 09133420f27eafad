"""Watch events of PDClusters: into the cache, and the PDCluster into the work queue. One low-level
handler, so kopf adds no finalizer, no annotation and no retries of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kopf

from pdcluster_api.apiserver.kinds import PDCLUSTER, Key
from pdcluster_operator.informer.cache import Cache


@dataclass(frozen=True)
class Watch:
    """listed: called when the watch listed again, and may have missed deletions."""

    cache: Cache
    add: Callable[[Key], None]
    listed: Callable[[], None]

    async def on_event(self, *, event: kopf.RawEvent, **_: Any) -> None:
        if event["type"] is None:
            self.listed()
        learn = self.cache.remove if event["type"] == "DELETED" else self.cache.put
        key = learn(PDCLUSTER.name, event["object"])
        if key is not None:
            self.add(key)


def register(registry: kopf.OperatorRegistry, watch: Watch) -> None:
    kopf.on.event(PDCLUSTER.api_version, PDCLUSTER.plural, registry=registry, id=PDCLUSTER.plural)(
        watch.on_event
    )
