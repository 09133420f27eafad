"""The spec of a PDCluster under the revision that its workers run as. Pure."""

from collections.abc import Collection

from pdcluster_api.apiserver.observe import Live, pods_by_workload, set_workload
from pdcluster_api.plan.gates import as_rolled_back
from pdcluster_schema import labels
from pdcluster_schema.continuation import Snapshot, continued
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.sections import ENGINELESS
from pdcluster_schema.workload import WorkloadId


def as_it_runs(cluster: PDCluster, live: Live) -> PDCluster:
    """The cluster under the revision and templates that its workers run as, or have run as, if any
    do; under those before them while it is rolled back.
    """
    retired = live.retired
    found = [
        Snapshot(workload, body["metadata"]["labels"], is_retired=workload in retired)
        for workload, body in live.records()
        if workload.role not in ENGINELESS
    ]
    recorded = {each.workload.role for each in found if not each.is_retired}
    is_whole = cluster.spec.roles.computing().keys() <= recorded
    found_as = continued(cluster, found, {} if is_whole else _unrecorded(live, recorded))
    sets = (set_workload(body) for body in live.own("StatefulSet").values())
    known = {*(each.workload for each in found), *(each for each in sets if each)}
    command = (live.body["metadata"].get("annotations") or {}).get(labels.ROLLOUT, "")
    return as_rolled_back(found_as, live.body.get("status", {}), str(command), known)


def _unrecorded(live: Live, recorded: Collection[str]) -> dict[WorkloadId, bool]:
    """Workloads of other roles than those with snapshots, and whether only their end is left."""
    sets = ((set_workload(body), body) for body in live.own("StatefulSet").values())
    ends = {
        workload: "deletionTimestamp" in body["metadata"] for workload, body in sets if workload
    }
    every = dict.fromkeys(pods_by_workload(live), True) | ends
    return {each: ends for each, ends in every.items() if each.role not in recorded}
