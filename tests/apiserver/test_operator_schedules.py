"""A schedule that the API server cannot check: the operator says what is wrong, changes nothing,
and goes on when it is mended.
"""

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi
from tests.schema.object_cases import NIGHT


async def test_an_unknown_time_zone_is_a_condition_that_names_the_schedule(
    control_plane: ControlPlane, namespace: str
) -> None:
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create(autoscale={"mode": "On", "budget": {"total": 8}, "schedules": [NIGHT]})
    async with passes_over(control_plane.kubeconfig, namespace) as passes:
        await passes.until_written()
        path = scene.path("StatefulSet", scene.workload("decode"))
        before = scene.api.get(path)
        scene.change(autoscale={"schedules": [{**NIGHT, "timeZone": "Mars/Olympus"}]})
        await passes.loop.fill()
        await passes.until_written()
        stalled = scene.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
        assert (
            "spec.autoscale.schedules[0].timeZone: 'Mars/Olympus' is not a known time zone"
            in stalled["message"]
        )
        after = scene.api.get(path)
        assert before is not None
        assert after is not None
        assert after["spec"] == before["spec"]

        scene.change(autoscale={"schedules": [{**NIGHT, "timeZone": "Europe/Berlin"}]})
        await passes.loop.fill()
        await passes.until_written()
        assert scene.condition("Stalled") == {}
