"""A roll out beyond autoscale.budget: status and event have it before an object of the new revision
is made.
"""

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi

EIGHT = [{"name": "gpu", "gpu": "B200", "gpusPerReplica": 8, "replicas": 1, "maxReplicas": 4}]


async def test_a_roll_out_beyond_the_budget_is_reported_before_its_workers_are_made(
    control_plane: ControlPlane, namespace: str
) -> None:
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create(
        roles={"prefill": {"pools": EIGHT}, "decode": {"pools": EIGHT}},
        autoscale={"mode": "On", "budget": {"total": 16}},
        rollout={"strategy": "BlueGreen"},
    )
    async with passes_over(control_plane.kubeconfig, namespace) as passes:
        await passes.until_written()
        before = set(scene.children("StatefulSet"))
        scene.change(engine={"maxBatchedTokens": 512})
        await passes.loop.fill()

        first = await passes.one()
        over = scene.condition("RolloutOverBudget")
        assert (over["status"], first.requeue_after_seconds) == ("True", 0.0)
        assert "needs 32 accelerators, 16 beyond budget.total 16" in over["message"]
        assert set(scene.children("StatefulSet")) == before

        await passes.until_written()
        assert len(set(scene.children("StatefulSet")) - before) == 2
        assert scene.condition("RolloutOverBudget")["message"] == over["message"]
