"""PDClusters as users see them: stored fields, the columns of `kubectl get`, changes of a second
apply.
"""

from typing import Any

import pytest
import yaml

from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.apiserver.objects import Objects
from tests.schema.object_cases import FULL, at, minimal

CONDITION = {"lastTransitionTime": "2026-01-02T03:04:05Z", "observedGeneration": 1}
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "Starting",
            "message": "1 of 2 decode workers is ready",
            **CONDITION,
        },
        {
            "type": "Serving",
            "status": "True",
            "reason": "Answering",
            "message": "requests are answered",
            **CONDITION,
        },
        {
            "type": "Disaggregating",
            "status": "True",
            "reason": "Offloading",
            "message": "about 85% are",
            **CONDITION,
        },
    ],
    "revision": "0a1b2c3d",
    "servingRevision": "0a1b2c3d",
    "endpoint": "http://chat.default.svc:8000",
    "model": "tiny",
    "prefill": "1/1",
    "decode": "1/2",
    "disaggregation": {"transport": "tcp", "remoteShare": "85%"},
    "roles": [
        {
            "name": "decode",
            "desired": 2,
            "ready": 1,
            "pools": [
                {"name": "cpu", "gpu": "cpu", "desired": 2, "current": 2, "ready": 1, "updated": 2}
            ],
        }
    ],
}


def test_what_is_not_given_is_not_stored(dry_clusters: Objects) -> None:
    document = minimal()
    document["spec"]["roles"]["prefill"]["engine"] = {}

    spec = dry_clusters.create(document, dry_run=True).content["spec"]
    assert set(spec) == {"model", "roles"}
    assert spec["roles"]["prefill"]["engine"] == {}


def test_unknown_field_is_refused(control_plane: ControlPlane, namespace: str) -> None:
    document = minimal()
    document["spec"]["roles"]["decode"]["pools"][0]["replica"] = 2
    with pytest.raises(
        KubectlError,
        match=r'strict decoding error: unknown field "spec.roles.decode.pools\[0\].replica"',
    ):
        control_plane.kubectl(
            "apply", "--namespace", namespace, "--filename=-", input=yaml.safe_dump(document)
        )


def test_pod_template_is_stored_as_it_is(dry_clusters: Objects) -> None:
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "anything": {"goes": [1, {"x": None}]},
            "containers": [{"name": "worker", "env": []}],
        },
    }
    document = minimal()
    document["spec"]["podTemplate"] = template
    document["spec"]["roles"]["decode"]["podTemplate"] = template
    spec = dry_clusters.create(document, dry_run=True).content["spec"]

    assert (spec["podTemplate"], spec["roles"]["decode"]["podTemplate"]) == (template, template)


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_columns_as_kubectl_prints_them(
    control_plane: ControlPlane, namespace: str, clusters: Objects
) -> None:
    clusters.create(minimal())
    get = ("get", "pdc", "--namespace", namespace)
    assert table(control_plane.kubectl(*get))[0] == [
        "NAME",
        "MODEL",
        "PREFILL",
        "DECODE",
        "ROUTER",
        "READY",
        "REASON",
        "AGE",
    ]
    answer = clusters.merge("chat", {"status": STATUS}, "status")
    assert answer.accepted, answer.causes

    assert table(control_plane.kubectl(*get))[1][:-1] == [
        "chat",
        "tiny",
        "1/1",
        "1/2",
        "False",
        "Starting",
    ]
    wide = table(control_plane.kubectl(*get, "--output=wide"))
    assert wide[0] == [
        "NAME",
        "MODEL",
        "PREFILL",
        "DECODE",
        "ROUTER",
        "READY",
        "REASON",
        "DISAGGREGATING",
        "REMOTE",
        "AUTOSCALE",
        "ENDPOINT",
        "REVISION",
        "AGE",
    ]
    assert wide[1][6:8] == ["True", "85%"]
    assert clusters.merge("chat", {"status": {"router": "1/3"}}, "status").accepted
    assert table(control_plane.kubectl(*get))[1][:-1] == [
        "chat",
        "tiny",
        "1/1",
        "1/2",
        "1/3",
        "False",
        "Starting",
    ]
    assert wide[1][-3:-1] == ["http://chat.default.svc:8000", "0a1b2c3d"]


def test_status_is_a_world_of_its_own(
    control_plane: ControlPlane, namespace: str, clusters: Objects
) -> None:
    """Spec writes leave the status, status writes leave spec and generation; nothing of the status
    is lost on the way.
    """
    clusters.create(minimal() | {"status": {"model": "not mine to write"}})
    assert clusters.get("chat")["status"] == {"observedGeneration": -1}
    clusters.merge("chat", {"status": STATUS, "spec": {"service": {"port": 1}}}, "status")
    stored = clusters.get("chat")

    assert stored["status"] == STATUS
    assert "service" not in stored["spec"]
    assert stored["metadata"]["generation"] == 1
    here = ("--namespace", namespace, "pdc/chat")
    assert "condition met" in control_plane.kubectl(
        "wait", "--for=condition=Serving", "--timeout=5s", *here
    )
    with pytest.raises(KubectlError, match="timed out"):
        control_plane.kubectl("wait", "--for=condition=Ready", "--timeout=1s", *here)


@pytest.mark.parametrize(
    ("status", "field"),
    [
        (
            {
                "conditions": [
                    {"type": "Ready", "status": "Maybe", "reason": "A", "message": "", **CONDITION}
                ]
            },
            "status.conditions[0].status",
        ),
        (
            {"conditions": [{"type": "Ready", "status": "True", **CONDITION}]},
            "status.conditions[0].reason",
        ),
        ({"roles": [{"name": "decode"}, {"name": "decode"}]}, "status.roles[1]"),
        ({"surprise": 1}, "patch"),
    ],
)
def test_status_of_another_form_is_refused(
    status: dict[str, Any], field: str, clusters: Objects
) -> None:
    clusters.create(minimal())
    answer = clusters.merge("chat", {"status": status}, "status")

    assert not answer.accepted
    assert field in [each for each, _ in answer.causes]


def test_short_name_and_category(
    control_plane: ControlPlane, namespace: str, clusters: Objects
) -> None:
    clusters.create(minimal())

    assert (
        control_plane.kubectl("get", "pdc", "--namespace", namespace, "--output=name")
        == "pdcluster.pdcluster.io/chat\n"
    )
    assert (
        "pdcluster.pdcluster.io/chat"
        in control_plane.kubectl("get", "all", "--namespace", namespace, "--output=name").split()
    )


def test_the_same_object_again_changes_nothing(
    control_plane: ControlPlane, namespace: str, clusters: Objects
) -> None:
    """However it comes: no new generation, so nothing rolls."""
    document = minimal()
    FULL(document)
    text, here = yaml.safe_dump(document), ("--namespace", namespace, "--filename=-")
    control_plane.kubectl("apply", *here, input=text)
    before = clusters.get("chat")

    control_plane.kubectl("apply", *here, input=text)
    control_plane.kubectl("replace", *here, input=text)
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", *here, input=text)
    assert clusters.apply(document, manager="argocd-controller", force=True).accepted
    after = clusters.get("chat")
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]


def test_server_side_apply_owns_a_pool_alone(clusters: Objects) -> None:
    """Pools are a map by name: two managers can each own one of a role."""
    document = minimal()
    assert clusters.apply(document).accepted
    other = minimal()
    del other["spec"]["model"]
    other["spec"]["roles"] = {"decode": {"pools": [{"name": "b300", "gpu": "B300", "replicas": 2}]}}
    answer = clusters.apply(other, manager="another")

    assert answer.accepted, answer.causes
    assert [pool["name"] for pool in clusters.get("chat")["spec"]["roles"]["decode"]["pools"]] == [
        "cpu",
        "b300",
    ]


def test_pools_can_come_and_go(clusters: Objects) -> None:
    """A pool's gpu is fixed for its life; a removed name is free again."""
    clusters.create(minimal())
    for pools in (
        [{"name": "b300", "gpu": "B300", "replicas": 1}, {"name": "cpu", "replicas": 1}],
        [{"name": "b300", "gpu": "B300", "replicas": 1}],
        [
            {"name": "b300", "gpu": "B300", "replicas": 0},
            {"name": "cpu", "gpu": "H200", "replicas": 1},
        ],
    ):
        changed = clusters.get("chat")
        at("spec.roles.decode.pools", pools)(changed)
        answer = clusters.replace(changed)
        assert answer.accepted, answer.causes
