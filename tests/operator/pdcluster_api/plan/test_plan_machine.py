"""A random walk over edits of the spec, scales, pods, lost objects, roll outs and their undo, each
plan carried out on a simulated cluster.

Checked on every plan: it is deterministic; what serves keeps its workers until
the switch; two revisions at most; sizes stay within their bounds; a scaler is
written only for a changed `replicas` or a lost one; Recreate never runs two
revisions.  At the end all ills are healed, and the cluster comes to rest as it
is declared: then planning again changes nothing at all.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdcluster_api.plan.gates import read_gate
from pdcluster_api.plan.observed.state import DiscoveryState, Observed, Previous
from pdcluster_api.plan.rollout import current_revision
from pdcluster_schema.conditions import NEEDS_ACTION
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    ETCD_READY,
    LATER,
    Planned,
    condition_of,
    make_cluster,
    pool,
)
from tests.operator.pdcluster_api.plan.simulated import (
    SimulatedCluster,
    assert_as_declared,
    assert_at_rest,
    declared_places,
)

NAMES = ("x", "y")
BOUNDS = st.sampled_from(
    [{}, {"minReplicas": 1}, {"maxReplicas": 2}, {"minReplicas": 1, "maxReplicas": 3}]
)
SIZES = st.integers(0, 4)
PLACES = st.sampled_from(
    [(role, name) for role in ("prefill", "decode", "mixed") for name in NAMES]
)
REVISIONS = st.integers(64, 66)


class ClusterMachine(RuleBasedStateMachine):
    """One PDCluster beside its simulated Kubernetes."""

    def __init__(self) -> None:
        super().__init__()
        self.existing = SimulatedCluster()
        self.engine, self.strategy, self.is_mixed = 64, "BlueGreen", False
        self.pools: dict[tuple[str, str], dict[str, Any]] = {
            (role, "x"): pool(1, "x") for role in ("prefill", "decode", "mixed")
        }

    def cluster(self) -> PDCluster:
        by_role = {
            role: [each for (owner, _), each in self.pools.items() if owner == role]
            for role in ("prefill", "decode", "mixed")
        }
        mixed = by_role["mixed"] if self.is_mixed else ()
        return make_cluster(
            prefill=by_role["prefill"],
            decode=by_role["decode"],
            mixed=mixed,
            engine=self.engine,
            strategy=self.strategy,
        )

    # The user's changes of the spec.

    @rule(engine=REVISIONS)
    def change_the_engine(self, engine: int) -> None:
        self.engine = engine
        self.existing.generation += 1

    @rule(strategy=st.sampled_from(["BlueGreen", "Recreate"]))
    def change_the_strategy(self, strategy: str) -> None:
        self.strategy = strategy
        self.existing.generation += 1

    @rule()
    def change_the_roles(self) -> None:
        self.is_mixed = not self.is_mixed
        self.existing.generation += 1

    @rule(place=PLACES, replicas=SIZES, bounds=BOUNDS)
    def declare_a_pool(self, place: tuple[str, str], replicas: int, bounds: dict[str, int]) -> None:
        within = max(
            min(replicas, bounds.get("maxReplicas", replicas)), bounds.get("minReplicas", 0)
        )
        self.pools[place] = pool(within, place[1], **bounds)
        self.existing.generation += 1

    @rule(place=PLACES)
    def remove_a_pool(self, place: tuple[str, str]) -> None:
        if sum(role == place[0] for role, _ in self.pools) > 1 and place in self.pools:
            del self.pools[place]
            self.existing.generation += 1

    @rule(verb=st.sampled_from(["", "resume", "undo"]))
    def command_the_roll_out(self, verb: str) -> None:
        found = read_gate(self.existing.status)
        since = found.since if found is not None else None
        words_of = {"resume": f"resume {since}", "undo": f"undo {self.existing.generation}"}
        self.existing.command = words_of.get(verb, verb)

    # Writes of others.

    @precondition(lambda self: self.existing.scalers)
    @rule(data=st.data(), replicas=SIZES)
    def scale(self, data: st.DataObject, replicas: int) -> None:
        self.existing.scale(data.draw(st.sampled_from(sorted(self.existing.scalers))), replicas)

    @precondition(lambda self: self.existing.scalers)
    @rule(data=st.data())
    def lose_a_scaler(self, data: st.DataObject) -> None:
        del self.existing.scalers[data.draw(st.sampled_from(sorted(self.existing.scalers)))]

    @precondition(lambda self: self.existing.sets)
    @rule(data=st.data(), replicas=SIZES)
    def edit_or_lose_a_stateful_set(self, data: st.DataObject, replicas: int) -> None:
        workload = data.draw(st.sampled_from(sorted(self.existing.sets)))
        if replicas:
            self.existing.sets[workload] = replicas
        else:
            self.existing.delete_set(workload)

    @rule(selected=st.sampled_from([None, "edited", "declared"]))
    def edit_or_lose_the_service(self, selected: str | None) -> None:
        self.existing.service_role = None
        self.existing.service = (
            revision_of(self.cluster().spec) if selected == "declared" else selected
        )

    # The machines.

    @precondition(lambda self: self.existing.sets or self.existing.pods)
    @rule(data=st.data(), times=st.integers(1, 6))
    def pods_go_on(self, data: st.DataObject, times: int) -> None:
        workload = data.draw(st.sampled_from(sorted({*self.existing.sets, *self.existing.pods})))
        for _ in range(times):
            self.existing.step(workload)

    @precondition(lambda self: self.existing.pods)
    @rule(data=st.data(), ends=st.booleans())
    def a_pod_falls_ill(self, data: st.DataObject, ends: bool) -> None:
        workload = data.draw(st.sampled_from(sorted(self.existing.pods)))
        (self.existing.fail if ends else self.existing.lose_readiness)(workload)

    @rule(broken=st.booleans())
    def the_declared_revision_breaks_or_mends(self, broken: bool) -> None:
        revision = revision_of(self.cluster().spec)
        (self.existing.broken.add if broken else self.existing.broken.discard)(revision)

    @rule(
        error=st.sampled_from([None, "etcd 10.0.0.1:2379 does not answer"]), refused=st.booleans()
    )
    def surroundings_change(self, error: str | None, refused: bool) -> None:
        self.existing.discovery = DiscoveryState(managed=False, error=error)
        self.existing.service_refused = refused

    # The operator.

    @rule(crash=st.booleans())
    def reconcile(self, crash: bool) -> None:
        self._pass(crash=crash)

    @rule()
    def come_to_rest(self) -> None:
        """Without healing: whatever is wrong, the operator stops writing."""
        cluster = self.cluster()
        for _ in range(40):
            before = repr(self.existing)
            self._pass()
            for workload in sorted({*self.existing.sets, *self.existing.pods}):
                self.existing.step(workload)
            if repr(self.existing) == before:
                break
        assert_at_rest(self.existing, cluster)

    def _pass(self, *, crash: bool = False) -> None:
        cluster, observed = self.cluster(), self.existing.observe()
        plan = self.existing.plan(cluster)
        assert plan == self.existing.plan(cluster)
        check_plan(plan, observed, self.existing.bound(cluster))
        check_status(plan, observed)
        self.existing.carry_out(plan, crash=crash)
        if not crash:
            assert (
                self.existing.plan(cluster, LATER).events == ()
                or self.existing.observe() != observed
            )

    def teardown(self) -> None:
        self.existing.broken.clear()
        self.existing.discovery, self.existing.service_refused = ETCD_READY, False
        cluster = self.cluster()
        self.existing.settle(cluster)
        gate = read_gate(self.existing.status)
        self.existing.command = "" if gate is None else f"resume {gate.since}"
        self.existing.settle(cluster)
        assert_at_rest(self.existing, cluster)
        assert_as_declared(self.existing, cluster)


def check_plan(plan: Planned, observed: Observed, cluster: PDCluster) -> None:
    target = revision_of(cluster.spec)
    current = current_revision(
        observed, target, is_target_ready=can_take_over(plan, observed, target)
    )
    planned = {workload.id: workload.replicas for workload in plan.workloads}
    assert len(planned) == len(plan.workloads)
    assert {workload.revision for workload in planned} <= {target, current}
    assert plan.serving in (
        target,
        current,
        observed.service_revision,
        observed.status.get("servingRevision"),
    )
    pools = {
        (role, each.name): each
        for role, spec in cluster.spec.roles.present().items()
        for each in spec.pools
    }
    for workload, replicas in planned.items():
        if workload.revision == target and (workload.role, workload.pool) in pools:
            declared = pools[workload.role, workload.pool]
            assert (declared.min_replicas or 0) <= replicas <= (declared.max_replicas or replicas)
    check_scalers(plan, observed, pools)
    live = {state.id: state.desired for state in observed.workloads if not state.gone}
    if current not in (None, target):
        if cluster.spec.rollout.strategy == "BlueGreen":
            kept = {
                workload: size for workload, size in live.items() if workload.revision == current
            }
            sizes = {
                **{workload.name: size for workload, size in kept.items()},
                **Previous(observed.status).kept(),
            }
            assert all(planned.get(workload, -1) >= sizes[workload.name] for workload in kept), (
                "what serves lost workers before the switch"
            )
            if kept and plan.serving == target:
                check_switch(plan, observed, target)
        elif any(state.id.revision != target for state in observed.workloads):
            assert set(planned) <= set(live), "Recreate made workers beside the old"
            assert {workload.revision for workload in planned} <= {target}
    else:
        assert set(planned) >= {
            each for each in live if (each.role, each.pool) in pools and each.revision == target
        }
    check_leaving(
        plan,
        observed,
        cluster,
        {(each.role, each.pool) for each in planned} - set(pools) if current == target else None,
    )
    if not plan.workloads:
        assert cluster.spec.rollout.strategy == "Recreate"


def check_leaving(
    plan: Planned, observed: Observed, cluster: PDCluster, leaving: set[tuple[str, str]] | None
) -> None:
    """Pools that answer stay until those that are declared instead are ready.  leaving: places that
    are planned and not declared.
    """
    if leaving is None:
        return
    target, ready = revision_of(cluster.spec), plan.status["conditions"]
    unready = {
        each["type"].removesuffix("Ready").lower() for each in ready if each["status"] == "False"
    }
    answering = [
        state
        for state in observed.workloads
        if state.id.revision == target and state.ready and not state.gone
    ]
    existing = {(state.id.role, state.id.pool) for state in answering}
    gone = {place for place in existing if place not in declared_places(cluster)}
    is_kept = cluster.spec.rollout.strategy == "BlueGreen"
    assert leaving == {(role, pool) for role, pool in gone if role in unready and is_kept}


def can_take_over(plan: Planned, observed: Observed, target: str) -> bool:
    """Return whether all declared workers are ready, by the sizes in the status."""
    wanted = {
        (role["name"], each["name"]): each["desired"]
        for role in plan.status["roles"]
        for each in role["pools"]
    }
    ready = {
        (state.id.role, state.id.pool): state.ready
        for state in observed.workloads
        if state.id.revision == target and not state.gone
    }
    answers = any(size for (role, _), size in wanted.items() if role != "prefill")
    return not answers or (
        observed.discovery.error is None
        and all(ready.get(place, -1) >= size for place, size in wanted.items())
    )


def check_switch(plan: Planned, observed: Observed, target: str) -> None:
    """Traffic moves to a whole revision only, or to one that is to answer nothing."""
    ready = {state.id: state.ready for state in observed.workloads if not state.gone}
    planned = [workload for workload in plan.workloads if workload.id.revision == target]
    is_whole = all(ready.get(workload.id, -1) >= workload.replicas for workload in planned)
    answers = any(workload.replicas for workload in planned if workload.id.role != "prefill")
    assert not answers or (is_whole and observed.discovery.error is None)


def check_scalers(plan: Planned, observed: Observed, pools: dict[tuple[str, str], Any]) -> None:
    assert [(scaler.role, scaler.pool) for scaler in plan.scalers] == list(pools)
    known = {(scaler.role, scaler.pool): scaler for scaler in observed.scalers}
    for scaler in plan.scalers:
        before = known.get((scaler.role, scaler.pool))
        assert scaler.seen == pools[scaler.role, scaler.pool].replicas
        is_request = before is None or before.seen != scaler.seen
        assert (scaler.request is not None) == is_request, (
            "a scaler is written for a changed or a lost one only"
        )


def check_status(plan: Planned, observed: Observed) -> None:
    ready, stalled, reconciling = (
        condition_of(plan.status, kind) for kind in ("Ready", "Stalled", "Reconciling")
    )
    assert plan.status["observedGeneration"] == observed.generation
    assert bool(stalled) + bool(reconciling) == (ready["status"] == "False")
    assert bool(stalled) == (ready["status"] == "False" and ready["reason"] in NEEDS_ACTION)
    answering = [
        state
        for state in observed.workloads
        if state.id.revision == observed.service_revision and not state.gone
    ]
    is_serving = any(state.ready for state in answering if state.id.role != "prefill")
    assert condition_of(plan.status, "Serving")["status"] == str(is_serving)
    for condition in plan.status["conditions"]:
        assert condition["message"]


TestClusterPlan = ClusterMachine.TestCase
TestClusterPlan.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
