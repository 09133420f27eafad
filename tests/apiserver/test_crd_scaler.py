"""PDPoolScalers: the scale subresource that `kubectl scale` and HPA write, and what
cannot change.
"""

from typing import Any

import pytest

from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.apiserver.objects import Objects
from tests.schema.object_cases import Change, at, without

NAME = "chat-decode-cpu"
SELECTOR = "pdcluster.io/cluster=chat,pdcluster.io/role=decode,pdcluster.io/pool=cpu"


def scaler() -> dict[str, Any]:
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDPoolScaler",
        "metadata": {"name": NAME},
        "spec": {"cluster": "chat", "role": "decode", "pool": "cpu", "replicas": 2},
    }


def test_kubectl_scale_writes_the_request(
    control_plane: ControlPlane, namespace: str, scalers: Objects
) -> None:
    scalers.create(scaler())
    scalers.merge(NAME, {"status": {"replicas": 2, "selector": SELECTOR}}, "status")
    control_plane.kubectl("scale", f"pdps/{NAME}", "--replicas=5", "--namespace", namespace)

    assert scalers.get(NAME)["spec"] == {**scaler()["spec"], "replicas": 5}
    scale = scalers.get(NAME, "scale")
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 5},
        {"replicas": 2, "selector": SELECTOR},
    )


def test_kubectl_scale_may_ask_for_none_and_not_for_less(
    control_plane: ControlPlane, namespace: str, scalers: Objects
) -> None:
    scalers.create(scaler())
    control_plane.kubectl("scale", f"pdps/{NAME}", "--replicas=0", "--namespace", namespace)
    assert scalers.get(NAME)["spec"]["replicas"] == 0

    answer = scalers.merge(NAME, {"spec": {"replicas": -1}}, "scale")
    assert not answer.accepted
    assert "spec.replicas" in answer.causes[0][0]


def test_scaler_columns_as_kubectl_prints_them(
    control_plane: ControlPlane, namespace: str, scalers: Objects
) -> None:
    scalers.create(scaler())
    scalers.merge(NAME, {"status": {"replicas": 1}}, "status")
    header, row = (
        line.split()
        for line in control_plane.kubectl("get", "pdps", "--namespace", namespace).splitlines()
    )

    assert header == ["NAME", "CLUSTER", "ROLE", "POOL", "DESIRED", "CURRENT", "AGE"]
    assert row[:-1] == [NAME, "chat", "decode", "cpu", "2", "1"]


@pytest.mark.parametrize(
    ("field", "value"), [("cluster", "other"), ("role", "prefill"), ("pool", "b300")]
)
def test_scaler_keeps_its_pool(field: str, value: str, scalers: Objects) -> None:
    scalers.create(scaler())
    answer = scalers.merge(NAME, {"spec": {field: value}})

    assert answer.causes == [
        (
            "spec",
            'Invalid value: "object": cluster, role and pool cannot change: the operator makes a '
            "scaler for each pool",
        )
    ]
    assert scalers.merge(NAME, {"spec": {"replicas": 3}}).accepted


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (without("spec"), "spec"),
        (without("spec.replicas"), "spec.replicas"),
        (without("spec.pool"), "spec.pool"),
        (at("spec.cluster", ""), "spec.cluster"),
        (at("spec.role", "encode"), "spec.role"),
        (at("spec.replicas", -1), "spec.replicas"),
        (at("spec.replicas", 1025), "spec.replicas"),
        (at("spec.minReplicas", 1), ""),
    ],
)
def test_scaler_of_another_form_is_refused(change: Change, field: str, scalers: Objects) -> None:
    document = scaler()
    change(document)
    answer = scalers.create(document, dry_run=True)

    assert not answer.accepted
    assert field in [each for each, _ in answer.causes], answer.causes


def test_scale_of_what_is_not_there_says_so(control_plane: ControlPlane, namespace: str) -> None:
    with pytest.raises(KubectlError, match="not found"):
        control_plane.kubectl("scale", f"pdps/{NAME}", "--replicas=1", "--namespace", namespace)
