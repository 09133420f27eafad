"""Memory of a PDCluster that is scaled by metrics, between its rounds of scrapes.

A round's decision that changes something waits here for the reconcile that the round enqueues.  It
is valid while the generation and the workloads are those that it was made on.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdcluster_api.plan.autoscale.values import Memory, Outcome
from pdcluster_api.plan.observed.state import Observed
from pdcluster_api.plan.sizes.pool_facts import is_unschedulable
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster


@dataclass(frozen=True)
class _PendingDecision:
    """A decision on its way to a reconcile.  made_on: see `_version`"""

    outcome: Outcome
    made_on: object


@dataclass
class AutoscaleState:
    """State while a PDCluster is followed.

    cluster, observed: of the last reconcile
    next_at: when its next round begins
    outcome: the last decision that was kept, or that a reconcile has taken
    leaving: pods that drain or terminate, scraped as long as they run
    task:    that runs the rounds; None = not begun
    _pending: the decision of the newest round, for the reconcile that it enqueued
    _unschedulable_since: since when each pod has been unschedulable, by name
    """

    cluster: PDCluster
    observed: Observed
    next_at: float
    windows: Windows
    outcome: Outcome | None = None
    leaving: frozenset[str] = frozenset()
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    _pending: _PendingDecision | None = None
    _unschedulable_since: dict[str, float] = field(default_factory=dict)

    @property
    def spec(self) -> AutoscaleSpec:
        """The autoscale section of its spec."""
        return self.cluster.spec.autoscale

    @property
    def memory(self) -> Memory:
        """Memory of the last decision."""
        return Memory() if self.outcome is None else self.outcome.memory

    @property
    def has_decided(self) -> bool:
        """Return whether a decision waits for a reconcile."""
        return self._pending is not None

    def put(self, outcome: Outcome, observed: Observed) -> None:
        """Keep a decision, made on this state, for the next reconcile."""
        self._pending = _PendingDecision(outcome, _version(observed))

    def drop(self) -> None:
        """Drop the decision that waits: a newer one is being made."""
        self._pending = None

    def pop(self) -> Outcome | None:
        """Return the decision that waits, once; None = there is none that is still valid."""
        pending, self._pending = self._pending, None
        if pending is None or pending.made_on != _version(self.observed):
            return None
        return pending.outcome

    def waits(self, observed: Observed, now: float) -> Mapping[str, float]:
        """Seconds for which each unschedulable pod has been so, by name."""
        pods = {
            pod.name for state in observed.workloads for pod in state.pods if is_unschedulable(pod)
        }
        self._unschedulable_since = {
            name: self._unschedulable_since.get(name, now) for name in pods
        }
        return {name: now - since for name, since in self._unschedulable_since.items()}


def _version(observed: Observed) -> object:
    """State that a decision is valid for: generation, serving revision and workloads."""
    workloads = frozenset(state.id for state in observed.workloads)
    return observed.generation, observed.service_revision, workloads
