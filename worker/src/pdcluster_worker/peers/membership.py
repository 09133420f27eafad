"""Members of a cluster: one leaves only when its key is gone and it answers no probe.

An etcd that came back empty, or whose leases ran out meanwhile, reports the same of workers that
are well.  One that had drained needs no probe.
"""

from collections.abc import Mapping

from pdcluster_worker.peers.records import WorkerRecord


class Membership:
    """missing: members whose keys are gone and that must be probed."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._missing: set[str] = set()

    @property
    def records(self) -> dict[str, WorkerRecord]:
        """A copy, by pod."""
        return dict(self._records)

    @property
    def missing(self) -> list[WorkerRecord]:
        return [self._records[pod] for pod in sorted(self._missing)]

    def resync(self, listing: Mapping[str, WorkerRecord]) -> bool:
        """Take a full listing.  True if a member changed."""
        changed = [self.put(record) for record in listing.values()]
        changed += [self.delete(pod) for pod in self._records.keys() - listing.keys()]
        return any(changed)

    def put(self, record: WorkerRecord) -> bool:
        """True if that changes a member."""
        self._missing.discard(record.pod)
        changed = self._records.get(record.pod) != record
        self._records[record.pod] = record
        return changed

    def delete(self, pod: str) -> bool:
        """True if that alone removes the member; else it is missing from now on."""
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
