"""No worker is scaled away while it holds a request: commands in a real etcd first, replicas when
they are obeyed.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_schema.drain_command import DrainCommand
from pdcluster_schema.etcd_keys import command_key
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, Rule, bind, leaving, ready
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, SPEC, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.apiserver.registered import Registered
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for

_numbers = itertools.count(1)
NAMESPACE = "operator-drain"


class Drained:
    """A ready cluster of three decode workers that register in an etcd of their own."""

    def __init__(
        self, scene: Scene, etcd: EtcdServer, workers: Registered, operator: OperatorProcess
    ) -> None:
        self.scene, self.etcd, self.workers, self.operator = scene, etcd, workers, operator

    def pod(self, ordinal: int) -> str:
        return f"{self.scene.workload('decode')}-{ordinal}"

    def scale(self, replicas: int) -> None:
        """`kubectl scale` on the scaler."""
        path = self.scene.path("PDPoolScaler", f"{self.scene.name}-decode-cpu")
        assert self.scene.api.merge(path, {"spec": {"replicas": replicas}}) is not None

    def await_replicas(self, replicas: int) -> None:
        wait_for(lambda: self.scene.replicas("decode") == replicas, DEADLINE_SECONDS, self.describe)

    def await_commands(self, *ordinals: int) -> None:
        wanted = {self.pod(ordinal) for ordinal in ordinals}
        wait_for(
            lambda: self.workers.commands(self.scene.name) == wanted,
            DEADLINE_SECONDS,
            self.describe,
        )

    def await_gone(self) -> None:
        """No command is left of a cluster that is deleted."""
        wait_for(
            lambda: not self.workers.commands(self.scene.name),
            DEADLINE_SECONDS,
            lambda: self.operator.log_end,
        )

    def await_states(self, *states: str) -> None:
        """Wait for these states of the decode workers, in their order."""

        def holds() -> bool:
            found = self.workers.states(self.scene.name)
            return [state for pod, state in sorted(found.items()) if "-decode-" in pod] == [*states]

        wait_for(holds, DEADLINE_SECONDS, self.describe)

    def await_words(self, words: str, kind: str = "DecodeReady") -> None:
        wait_for(
            lambda: words in self.scene.condition(kind).get("message", ""),
            DEADLINE_SECONDS,
            self.describe,
        )

    def await_looks(self) -> None:
        """The operator has looked at the cluster again and again."""
        before = self.operator.metric("pdcluster_operator_reconcile_seconds_count")
        wait_for(
            lambda: (
                self.operator.metric("pdcluster_operator_reconcile_seconds_count") >= before + 3
            ),
            DEADLINE_SECONDS,
            self.describe,
        )

    def describe(self) -> str:
        return (
            f"replicas {self.scene.replicas('decode')}; {self.scene.status}; "
            f"{self.operator.log_end}"
        )


def readiness_of(workers: Registered) -> Rule:
    """Pods are ready but for those that drain."""
    return lambda pod: leaving(pod) if pod["metadata"]["name"] in workers.leaving else ready(pod)


@pytest.fixture
def drained(
    control_plane: ControlPlane, operator: OperatorProcess, tmp_path: Path
) -> Iterator[Drained]:
    api, etcd = PlainApi(control_plane.kubeconfig), EtcdServer(tmp_path)
    etcd.start()
    scene = Scene(api, NAMESPACE, f"chat-{next(_numbers)}")
    decode = {"pools": [{"name": "cpu", "replicas": 3, "minReplicas": 0, "maxReplicas": 5}]}
    with Registered(api, NAMESPACE, etcd) as workers, Nodes(api, NAMESPACE, readiness_of(workers)):
        scene.create(
            roles={**SPEC["roles"], "decode": decode},
            discovery={"etcd": {"endpoints": [etcd.endpoint]}},
        )
        scene.await_condition("Ready", "True")
        found = Drained(scene, etcd, workers, operator)
        found.await_states("ready", "ready", "ready")
        yield found
        scene.delete()
        wait_for(lambda: not scene.pods(), DEADLINE_SECONDS, lambda: f"{scene.pods()}")
    etcd.close()


def test_replicas_go_down_when_the_highest_have_drained_and_the_commands_go_with_the_pods(
    drained: Drained,
):
    drained.workers.busy = {drained.pod(1)}
    drained.scale(1)
    drained.await_replicas(2)  # the highest had nothing to finish
    drained.await_commands(1)
    drained.await_states("ready", "draining")
    drained.await_words(f"1 worker drains before the pool shrinks: pod {drained.pod(1)}")
    drained.await_looks()
    assert drained.scene.replicas("decode") == 2
    assert drained.scene.condition("DecodeReady")["reason"] == "Scaling"
    drained.workers.busy = set()
    drained.await_replicas(1)
    drained.await_commands()
    drained.scene.await_condition("DecodeReady", "True", "AsDeclared")
    drained.scale(2)
    drained.await_states("ready", "ready")  # the new pod of the name has no drain command


def test_an_operator_that_is_killed_in_the_middle_goes_on(drained: Drained):
    drained.workers.busy = {drained.pod(2)}
    drained.scale(2)
    drained.await_commands(2)
    key = f"/pdcluster/{NAMESPACE}/{drained.scene.name}/commands/{drained.pod(2)}"
    since = json.loads(drained.etcd.values(key.rpartition("/")[0] + "/")[key])["since"]
    drained.operator.kill()
    drained.operator.start()
    drained.await_looks()
    assert drained.scene.replicas("decode") == 3
    assert json.loads(drained.etcd.values(key.rpartition("/")[0] + "/")[key])["since"] == since
    drained.workers.busy = set()
    drained.await_replicas(2)


def test_an_etcd_that_is_away_holds_a_shrink_and_one_that_comes_back_empty_gets_commands_again(
    drained: Drained,
):
    drained.etcd.kill()
    drained.scale(2)
    drained.await_words("shrinking is held: etcd does not say whether pod")
    drained.await_looks()
    assert drained.scene.replicas("decode") == 3
    drained.workers.busy = {drained.pod(2)}
    drained.etcd.start(empty=True)
    drained.await_commands(2)
    drained.await_states("ready", "ready", "draining")
    drained.await_looks()
    assert drained.scene.replicas("decode") == 3
    drained.workers.busy = set()
    drained.await_replicas(2)


def test_a_command_has_the_time_of_an_eviction_and_costs_no_other_worker(
    drained: Drained,
):
    api, node = drained.scene.api, "/api/v1/nodes/evicting"
    api.create(
        "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "evicting"}}
    )
    try:
        pods = [f"/api/v1/namespaces/{NAMESPACE}/pods/{drained.pod(each)}" for each in (0, 1)]
        bind(api, pods[0], "evicting")
        drained.await_looks()
        api.create(f"{pods[0]}/eviction", eviction(drained.pod(0), 20))
        wait_for(lambda: grace(drained) == 15, DEADLINE_SECONDS, drained.describe)  # less the hook
        drained.await_commands(0)
        drained.await_looks()
        # its successor is waited for, whatever its command says
        with pytest.raises(AssertionError, match="disruption budget"):
            api.create(f"{pods[1]}/eviction", eviction(drained.pod(1), 20))
        api.delete(f"{pods[0]}?gracePeriodSeconds=0")  # as its node does when it has ended
        drained.await_commands()
        drained.await_states("ready", "ready", "ready")
    finally:
        api.delete(node)


def eviction(pod: str, grace_seconds: int) -> Body:
    """As `kubectl drain --grace-period` asks for it."""
    kinds = {"apiVersion": "policy/v1", "kind": "Eviction"}
    metadata = {"name": pod, "namespace": NAMESPACE}
    return {**kinds, "metadata": metadata, "deleteOptions": {"gracePeriodSeconds": grace_seconds}}


def grace(drained: Drained) -> int | None:
    """Return the time that the command of the first worker has."""
    key = command_key(NAMESPACE, drained.scene.name, drained.pod(0))
    value = drained.etcd.values(key).get(key, b"")
    return DrainCommand.decode(value).grace_seconds


def test_what_a_time_limit_cuts_is_counted_and_reported(drained: Drained):
    cluster = {"namespace": NAMESPACE, "pdcluster": drained.scene.name}
    before = drained.operator.metric("pdcluster_operator_drains_cut_total", **cluster)
    drained.workers.busy = {drained.pod(2)}
    drained.scene.change(rollout={"drainTimeoutSeconds": 2})
    drained.scale(2)
    drained.await_states("ready", "ready", "draining")
    drained.await_replicas(2)
    wait_for(
        lambda: (
            drained.operator.metric("pdcluster_operator_drains_cut_total", **cluster) == before + 1
        ),
        DEADLINE_SECONDS,
        drained.describe,
    )
    path = f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"

    def notes() -> list[str]:
        return [
            event["note"]
            for event in drained.scene.api.items(path)
            if event["reason"] == "DrainCut"
        ]

    wait_for(
        lambda: any(f"pod {drained.pod(2)} had not drained" in note for note in notes()),
        DEADLINE_SECONDS,
        lambda: f"{notes()}",
    )


def test_the_commands_of_a_cluster_that_is_deleted_in_mid_drain_go_too(drained: Drained):
    drained.workers.busy = {drained.pod(2)}
    drained.scale(2)
    drained.await_commands(2)
    drained.scene.delete()
    drained.await_gone()
