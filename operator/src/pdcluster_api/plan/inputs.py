"""Derived inputs of one plan: revisions, pool sizes, rollout. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.autoscale.pools import flexible_pair
from pdcluster_api.plan.flips import FlippedSet, as_served, requested_flips
from pdcluster_api.plan.gates import Gate, RolloutCommand, read_gate
from pdcluster_api.plan.observed.pools import (
    PREFILL,
    DeclaredPool,
    DeclaredRevision,
    Ending,
    RoleView,
    Workloads,
    ending_of,
)
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, Previous, WorkloadState
from pdcluster_api.plan.rollout import FIELD as ROLLOUT
from pdcluster_api.plan.rollout import (
    Rollout,
    RolloutState,
    current_revision,
    is_blocked,
    is_rolled_back,
    next_rollout,
    old_pods_of,
    read_rollout,
)
from pdcluster_api.plan.sizes import PoolSize, pool_sizes
from pdcluster_api.plan.status.autoscaled import autoscaled
from pdcluster_api.plan.status.conditions import missing_parts, waiting_for
from pdcluster_api.plan.status.discovery import discovery_answers
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import is_rolled_back as is_spec_rolled_back
from pdcluster_schema.revision import rollout_name
from pdcluster_schema.rollout import Strategy
from pdcluster_schema.sections import COMPUTING, ROUTER
from pdcluster_schema.workload import PoolKey, WorkloadId


@dataclass(frozen=True)
class PlanInputs:
    cluster: PDCluster
    observed: Observed
    existing: Workloads
    target: str  # the declared revision
    current: str | None  # the revision that serves until this reconcile; None = none does
    sizes: tuple[PoolSize, ...]
    is_target_ready: bool  # whether the declared revision can take over
    rollout: Rollout | None  # the one that is under way to it; None = none is
    ending: Ending = field(default_factory=Ending)  # its terminating pods
    gate: Gate | None = None  # of that roll out, by the last status; None = none holds it
    declared: DeclaredRevision = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "declared", DeclaredRevision.of(self.cluster.spec))

    @property
    def replaced(self) -> list[WorkloadState]:
        """Workloads of the declared revision that others of their role take the place of."""
        return self.existing.replaced()

    @property
    def replaced_roles(self) -> frozenset[str]:
        return frozenset(state.id.role for state in self.replaced)

    @property
    def deadline(self) -> int:
        return self.cluster.spec.rollout.progress_deadline_seconds

    @property
    def has_fallback(self) -> bool:
        """True if others serve, if only by their name, until those that are declared are whole."""
        is_other = self.current not in (None, self.target) or bool(self.replaced)
        return is_other and self.strategy != "Recreate" and not self._has_rolled

    @property
    def strategy(self) -> Strategy:
        """Workers that serve together are replaced step by step to the end; those that answer in
        another role than before, behind routers or not, are not: the Service selects one.  Nor are
        those of which none is asked for while routers hold requests.
        """
        spec, is_wide = self.cluster.spec, self.observed.service_is_wide
        declared = spec.rollout_strategy
        if declared == "Recreate":
            return declared
        is_rolling = is_wide or (declared == "Rolling" and not self._routers_hold)
        same = self.existing.decoding_role(self.current) in (None, spec.decode_role)
        return "Rolling" if is_rolling and same else "BlueGreen"

    @property
    def _routers_hold(self) -> bool:
        """True if clients reach routers alone, since no worker behind them is asked for."""
        role = self.cluster.spec.decode_role
        is_asleep = not any(size.desired for size in self.sizes if size.role == role)
        return is_asleep and self.existing.ingress_role(self.current) == ROUTER

    @property
    def is_rolling(self) -> bool:
        """True if older workers are replaced step by step."""
        if self.strategy != "Rolling" or self.is_rolled_back:
            return False
        is_other = self.current not in (None, self.target)
        return is_other or bool(self.replaced) or self.observed.service_is_wide

    @property
    def flips(self) -> FlippedSet | None:
        """Workers that should serve the other role; all go back while others take their place step
        by step.
        """
        return None if self.is_rolling else requested_flips(self.cluster.spec, self.observed)

    @property
    def may_flip(self) -> bool:
        """Return whether another worker may change its role: not while a roll out runs."""
        is_alone = self.current == self.target and not self.replaced and not self.is_rolling
        return is_alone and self.rollout is None

    def num_away(self, key: PoolKey) -> int:
        """Workers that a declared pool has and that do not serve its role; negative = guests."""
        flips = self.flips
        if flips is None or self.current != self.target or self.replaced:
            return 0
        return flips.flipped.away(key)

    @property
    def _has_rolled(self) -> bool:
        """True if new workers serve beside the old ones, of which some may be gone."""
        if self.strategy != "Rolling":
            return False
        states = self.existing.of_revision(self.target)
        new = [state for state in states if state.id.role in self.replaced_roles and not state.gone]
        is_ready = any(state.ready for state in new if self.declared.has(state.id))
        return self.observed.service_is_wide or is_ready

    def size_before(self, workload: WorkloadId) -> int | None:
        """Workers that it should have by the last status, else by its StatefulSet."""
        living = (state for state in self.observed.workloads if not state.gone)
        size = next((state.desired for state in living if state.id == workload), None)
        return Previous(self.observed.status).kept().get(workload.name, size)

    @property
    def is_rolled_back(self) -> bool:
        return is_rolled_back(
            self.rollout, self.rollout_name, self.deadline, has_fallback=self.has_fallback
        )

    @property
    def rollout_name(self) -> str:
        """The declared revision, with the templates of roles that changed within it."""
        return rollout_name(self.cluster.spec)

    def is_given_up(self, workload: WorkloadId) -> bool:
        """Return whether it is to have no workers: others of its role, or of all, go on."""
        if not self.is_rolled_back or not self.declared.has(workload):
            return False
        return self.current != self.target or workload.role in self.replaced_roles

    def together(self, size: PoolSize) -> int:
        """Workers of a pool, of all its workloads."""
        states = self.observed.workloads
        return sum(state.current for state in states if (state.id.role, state.id.pool) == size.key)

    def shown(self, size: PoolSize) -> WorkloadState | None:
        """The workload of a pool's numbers: of the serving revision, else of the declared one."""
        serving = self.existing.serving(*size.key, self.current)
        return serving or self.existing.of(*size.key, self.target)

    def views(self) -> Iterator[RoleView]:
        for role in self.cluster.spec.roles.present():
            declared = [
                DeclaredPool(
                    *(size.pool.name, size.pool.gpu, size.desired - self.num_away(size.key)),
                    *(size.note, self.num_away(size.key)),
                )
                for size in self.sizes
                if size.role == role
            ]
            yield self.existing.view(
                *(role, declared),
                target=self.target,
                serving=self.current,
                is_rolling=self.is_rolling,
            )


def plan_inputs(cluster: PDCluster, observed: Observed, now: str | None = None) -> PlanInputs:
    """now: RFC 3339; None = the clock of a rollout stands where the last status has it"""
    declared_revision = DeclaredRevision.of(cluster.spec)
    flips = requested_flips(cluster.spec, observed)
    observed = as_served(flexible_pair(cluster.spec), flips, observed)
    existing, target = Workloads(observed, declared_revision), declared_revision.revision
    declared = pool_sizes(cluster.spec, observed.scalers, _last_sizes(cluster, observed, target))
    sizes = autoscaled(cluster.spec.autoscale, declared, observed)
    has_ingress = any(size.desired for size in sizes if size.role != PREFILL)
    own = existing.of_revision(target)
    names = {state.id.name for state in own if declared_revision.has(state.id)}
    is_flipped = flips is not None and flips.name in names
    away = {flips.flipped.home: flips.flipped.workers} if flips and is_flipped else {}
    is_whole = not has_ingress or all(
        (state := existing.of(*size.key, target)) is not None
        and state.ready >= size.desired - away.get(size.key, 0)
        for size in sizes
    )
    is_target_ready = is_whole and (not has_ingress or discovery_answers(observed.discovery))
    inputs = PlanInputs(
        cluster,
        observed,
        existing,
        target,
        current_revision(observed, target, is_target_ready=is_target_ready),
        sizes,
        is_target_ready,
        read_rollout(observed.status),
        ending_of(observed, now),
        _gate_of(cluster, observed),
    )
    if now is not None:
        found = _rollout_state(inputs, is_whole=is_whole)
        inputs = replace(inputs, rollout=next_rollout(inputs.rollout, found, now))
    return replace(inputs, is_target_ready=False) if inputs.is_rolled_back else inputs


def _gate_of(cluster: PDCluster, observed: Observed) -> Gate | None:
    """The gate of the last status; of a pause that it does not know yet, one after the step that is
    under way.  None on the way back, which nothing holds.
    """
    if is_spec_rolled_back(cluster.spec):
        return None
    name, gate = rollout_name(cluster.spec), read_gate(observed.status)
    if gate is not None and gate.revision == name and not gate.is_rolled_back:
        return gate
    is_paused = RolloutCommand(observed.rollout_command).holds
    if not is_paused or cluster.spec.rollout_strategy != "Rolling":
        return None
    found = Previous(observed.status).mapping(ROLLOUT)
    step, steps = found.get("step"), found.get("steps")
    if found.get("revision") == name and isinstance(step, int) and isinstance(steps, int):
        return Gate(name, steps, max(0, step - 1))
    return Gate(name)


def _rollout_state(inputs: PlanInputs, *, is_whole: bool) -> RolloutState:
    observed, views = inputs.observed, tuple(inputs.views())
    is_recreated = inputs.cluster.spec.rollout_strategy == "Recreate"
    left = old_pods_of(inputs.declared, observed, inputs.ending.lost) if is_recreated else None
    is_new = Previous(observed.status).text("revision") != inputs.target
    is_open = inputs.is_rolling and inputs.gate is not None and inputs.gate.is_open
    return RolloutState(
        revision=inputs.rollout_name,
        deadline=inputs.deadline,
        ready=sum(view.num_target_ready for view in views),
        left=0 if left is None else left.num_pods,
        is_under_way=inputs.has_fallback or left is not None or is_new,
        has_fallback=inputs.has_fallback,
        is_answered=inputs.existing.num_answering(inputs.current) > 0,
        is_done=inputs.is_target_ready and left is None and not is_open,
        is_whole=is_whole or (inputs.gate is not None and inputs.gate.is_held),
        is_blocked=is_blocked(observed.failures, inputs.cluster.metadata.name),
        missing=missing_parts(views, observed.discovery) if left is None else waiting_for(left),
        is_held_up=inputs.is_rolling
        and (_waits_for_drain(inputs) or _own_etcd_is_away(observed.discovery)),
    )


def _own_etcd_is_away(discovery: DiscoveryState) -> bool:
    """True if the etcd that we run does not answer.  Another one is of the revision: its address or
    certificate may be what is wrong with it.
    """
    return discovery.managed and not discovery_answers(discovery)


def _waits_for_drain(inputs: PlanInputs) -> bool:
    """True if old workers drain, whose places the next new ones take, and no new one starts."""
    states = [each for each in inputs.observed.workloads if each.id.role in COMPUTING]
    if any(each.ready < each.desired for each in states if inputs.declared.has(each.id)):
        return False
    lost = inputs.ending.lost
    return any(
        each.num_pods - sum(pod.ending.name in lost for pod in each.pods)
        > (0 if each.gone else inputs.size_before(each.id) or 0)
        for each in states
        if not inputs.declared.has(each.id)
    )


def _last_sizes(cluster: PDCluster, observed: Observed, target: str) -> Mapping[PoolKey, int]:
    """Seed of a lost scaler: the size of the last plan, else of the serving revision, else of the
    declared one.
    """
    desired = {key: desired for key, (_, desired) in Previous(observed.status).pools().items()}
    if desired:
        return desired
    existing, selected = Workloads(observed), current_revision(observed)
    return {
        (role, pool.name): state.desired
        for role, spec in cluster.spec.roles.present().items()
        for pool in spec.pools
        if (state := existing.of(role, pool.name, selected) or existing.of(role, pool.name, target))
    }
