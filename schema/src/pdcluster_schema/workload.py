"""One workload: the workers of one role, pool and revision, which Kubernetes runs as a
StatefulSet.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pdcluster_schema.names import workload_name

PoolKey = tuple[str, str]
"""(role, pool)"""


class PoolPair(NamedTuple):
    """Names of a prefill pool and of a decode pool."""

    prefill: str
    decode: str


@dataclass(frozen=True, order=True)
class WorkloadId:
    """Name of a workload, its StatefulSet, its snapshot (a ControllerRevision) and its engine
    file (a ConfigMap).
    """

    cluster: str
    role: str
    pool: str
    revision: str

    @property
    def name(self) -> str:
        """Name of all three objects."""
        return workload_name(self.cluster, self.role, self.pool, self.revision)


@dataclass(frozen=True)
class Workload:
    """A workload and how many workers it should have."""

    id: WorkloadId
    replicas: int
