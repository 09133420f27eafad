"""Workloads: the workers of one role, pool and revision, and what they are called."""

from dataclasses import dataclass
from typing import NamedTuple

# a StatefulSet's pods carry its name and a revision hash in one 63-character label
MAX_WORKLOAD_NAME = 52
MAX_GROUPED_NAME = MAX_WORKLOAD_NAME - len("-1023-f")
"""Most characters of a workload whose workers are of several pods, each with StatefulSets of its
own.
"""
REVISION_LENGTH = 8


def workload_name(cluster: str, role: str, pool: str, revision: str) -> str:
    """Name of the workload of one role, pool and revision."""
    return f"{cluster}-{role}-{pool}-{revision}"


def process_name(cluster: str, role: str, pool: str, ordinal: int) -> str:
    """Name of one worker process on a single machine."""
    return f"{cluster}-{role}-{pool}-{ordinal}"


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
    # of a role that has followed a change of its own within the revision; empty = as it was made
    template: str = ""

    @property
    def name(self) -> str:
        """Name of all three objects."""
        return workload_name(self.cluster, self.role, self.pool, self.template or self.revision)


@dataclass(frozen=True, order=True)
class GroupId:
    """One worker of several pods: its leader serves, and its followers compute for it."""

    workload: WorkloadId
    index: int

    @property
    def leader(self) -> str:
        """Name of the StatefulSet of its leader."""
        return f"{self.workload.name}-{self.index}"

    @property
    def followers(self) -> str:
        """Name of the StatefulSet of its other pods."""
        return f"{self.leader}-f"

    @property
    def leader_pod(self) -> str:
        """By which the worker is known."""
        return f"{self.leader}-0"


@dataclass(frozen=True)
class Workload:
    """A workload and how many workers it should have."""

    id: WorkloadId
    replicas: int
