"""Keep the members of a cluster: by etcd, which is doubted when it reports that a member is gone.

A member joins or changes by etcd's word alone.  It leaves only when etcd says
that its key is gone *and* it no longer answers a probe: an etcd that came back
empty, or whose leases ran out while it was away, says that of workers that are
well.  One that had announced the end of its drain needs no probe.  A member
whose key is gone but which answers stays, as `missing`, and is asked again.
Pure: reading etcd and probing are `discovery`'s business.
"""

from collections.abc import Mapping

from pdcluster_worker.peers.records import WorkerRecord


class Membership:
    """The last known record of each pod, and whose keys etcd does not have."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._missing: set[str] = set()

    @property
    def records(self) -> dict[str, WorkerRecord]:
        """A copy of all members by pod."""
        return dict(self._records)

    @property
    def missing(self) -> list[WorkerRecord]:
        """Members whose keys are gone and that must be probed."""
        return [self._records[pod] for pod in sorted(self._missing)]

    def resync(self, listing: Mapping[str, WorkerRecord]) -> bool:
        """Take a full listing; members that it lacks become missing.  True if a member changed."""
        changed = [self.put(record) for record in listing.values()]
        changed += [self.delete(pod) for pod in self._records.keys() - listing.keys()]
        return any(changed)

    def put(self, record: WorkerRecord) -> bool:
        """A key was written.  True if that changes a member."""
        self._missing.discard(record.pod)
        changed = self._records.get(record.pod) != record
        self._records[record.pod] = record
        return changed

    def delete(self, pod: str) -> bool:
        """A key is gone.  True if that alone removes the member; else it is missing from now on."""
        record = self._records.get(pod)
        if record is None:
            return False
        self._missing.add(pod)
        return record.state == "drained" and self.remove(record)

    def remove(self, record: WorkerRecord) -> bool:
        """The probe of a missing member failed.  False if it has written itself again meanwhile."""
        if record.pod not in self._missing or self._records[record.pod] != record:
            return False
        self._missing.discard(record.pod)
        del self._records[record.pod]
        return True
