"""A cluster as one of its ingress workers sees it: what `GET /debug/cluster` answers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KvTier:
    """Blocks below the pool, as in host memory."""

    name: str
    used_blocks: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Load of one worker.  Of KV blocks and bytes its engines count, of prompts a decode worker.

    num_transfers: requests whose KV is on its way to or from here.
    kv_bytes, remote_prefills, local_prefills: since its engines started.
    tiers: the fastest first; none where its engines have none.
    """

    num_running: int
    num_waiting: int
    used_blocks: int
    total_blocks: int
    num_transfers: int
    kv_bytes: int
    remote_prefills: int
    local_prefills: int
    tiers: list[KvTier] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """state: that of its record, or stalled, connecting, lost or refused, as seen from here.

    note: why it is refused.  figures: null of a worker whose reports do not come here.
    """

    pod: str
    role: str
    pool: str
    state: str
    note: str
    device: str
    figures: WorkerFigures | None


@dataclass(frozen=True, slots=True)
class History:
    """The last hour in periods, the one of now last; it begins with the worker that keeps it.

    ready: workers in that state at the end of each, by role.
    remote, local: prompts that prefill workers and decode workers computed in each.
    """

    period_seconds: int
    ready: dict[str, list[int]]
    remote: list[int]
    local: list[int]


@dataclass(frozen=True, slots=True)
class ConditionOverview:
    """One condition of the PDCluster.  since: time of the last change of its status, RFC 3339.

    severity: needs action, problem, on the way, unknown or fine.
    """

    type: str
    status: str
    reason: str
    message: str
    since: str
    severity: str = ""


@dataclass(frozen=True, slots=True)
class ConditionsOverview:
    """As the operator wrote them last, at `written` (RFC 3339), when one of them had changed."""

    written: str
    items: list[ConditionOverview]


@dataclass(frozen=True, slots=True)
class ClusterOverview:
    """pod, role: of the worker that answers.  problem: why it, or parts of it, do not serve.

    conditions: the worst first; null where no operator has written any.
    """

    namespace: str
    cluster: str
    revision: str
    model: str
    pod: str
    role: str
    problem: str | None
    workers: list[WorkerOverview]
    history: History
    conditions: ConditionsOverview | None = None
