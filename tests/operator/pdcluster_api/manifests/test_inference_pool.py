"""The InferencePool of a cluster."""

from tests.operator.pdcluster_api.manifests.rendering import shared_of
from tests.schema.object_cases import at

PICKED = at("spec.service.endpointPicker", {"name": "picker"})
POOL = ("InferencePool", "chat")


def test_pool_has_the_pods_of_the_ingress_service_and_the_picker() -> None:
    shared = shared_of(PICKED)
    spec = shared[POOL]["spec"]

    assert spec["selector"]["matchLabels"] == shared["Service", "chat"]["spec"]["selector"]
    assert spec["targetPorts"] == [{"number": 8000}]
    assert spec["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": "picker",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }


def test_pool_is_made_for_a_picker_alone() -> None:
    assert POOL not in shared_of()
