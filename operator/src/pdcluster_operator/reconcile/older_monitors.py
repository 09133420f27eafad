"""Remove the PodMonitors and PrometheusRules that an older operator made for each PDCluster.

The chart makes one of each for all PDClusters.  Beside them the old ones would have every
worker scraped twice, and every alert sent twice.  A chart that makes none sets no
`PDCLUSTER_REMOVE_OLDER_MONITORS`, and what there is stays: a new image with the chart of
before must not end the monitoring.  They are looked for once, beside the work, when the
operator begins to lead; these kinds are neither watched nor made.
"""

import logging
from collections.abc import Iterable

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, NotFoundError
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_operator.informer.cache import owner_of
from pdcluster_operator.informer.listing import SELECTOR

logger = logging.getLogger(__name__)
KINDS = (
    Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    Kind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
)


async def remove_older_monitors(client: ApiClient, namespaces: Iterable[str | None]) -> None:
    """Delete what belongs to a PDCluster; a cluster without these kinds has none.

    An error is logged with the command that does the same: nothing else waits for this.
    """
    for namespace in namespaces:
        for kind in KINDS:
            try:
                await _remove(client, kind, namespace)
            except NotFoundError:  # no such kind
                continue
            except ClusterError as e:
                place = f"--namespace {namespace}" if namespace else "--all-namespaces"
                fix = f"kubectl delete {kind.plural} {place} --selector {SELECTOR}"
                logger.warning(
                    "objects of an older version may be left kind=%s error=%s fix=%s", kind, e, fix
                )


async def _remove(client: ApiClient, kind: Kind, namespace: str | None) -> None:
    async for body in client.list(kind, namespace, labels=SELECTOR):
        if owner_of(kind.name, body) is not None:
            metadata = body["metadata"]
            await client.delete(kind, metadata["namespace"], metadata["name"], uid=metadata["uid"])
            logger.info(
                "removed object of an older version kind=%s namespace=%s name=%s",
                kind,
                metadata["namespace"],
                metadata["name"],
            )
