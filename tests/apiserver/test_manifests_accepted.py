"""Everything that is rendered, as the real API server takes it: fields, values, lengths,
quantities.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdcluster_api.manifests.objects import Manifest
from pdcluster_schema.load import parse
from pdctl.cli.main import app
from pdctl.cli.render import CHART, rendered
from tests.apiserver.control_plane import ControlPlane, KubectlError
from tests.schema.object_cases import FULL, GOOD, HUB, Change, at, both, minimal, vllm
from tests.system.waiting import wait_for

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("recipes/*.yaml")])
RIGHTS = {"privileged": True, "allowPrivilegeEscalation": True}
EVERYTHING = both(
    FULL,
    at(
        "spec.roles.prefill.resources",
        {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"cpu": "2500m"}},
    ),
    at(
        "spec.roles.decode.podTemplate",
        {"spec": {"containers": [{"name": "worker", "securityContext": RIGHTS}]}},
    ),
)
OWN_ETCD = both(
    EVERYTHING,
    at("spec.placement.mode", "Preferred"),
    at("spec.discovery.etcd", {"endpoints": ["a:1"], "tlsSecret": "etcd"}),
)
SHARED = {
    "runtimeClassName": "nvidia",
    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
    "initContainers": [
        {"name": "check", "image": "tools:1"},
        {"name": "engine", "resources": {"claims": [{"name": "nic"}]}},
    ],
}
ONE_TEMPLATE = both(
    vllm(),
    at("spec.model", HUB),
    at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]}),
    at("spec.roles.decode.pools.0.gpu", "B200"),
    at("spec.podTemplate.spec", SHARED),
)
"""One template for all roles, with what only engines have."""

CASES = {"one template": ONE_TEMPLATE} | {
    name: GOOD[name]
    for name in (
        "minimum",
        "mixed",
        "two pools",
        "hub",
        "volume",
        "endpoints",
        "longest name",
        "most pools",
        "stock engine with flags",
    )
}


def everything(namespace: str, change: Change) -> list[Manifest]:
    """All objects of one cluster."""
    document = minimal()
    change(document)
    document["metadata"]["namespace"] = namespace
    return rendered(parse(document), CHART, "2026-01-02T03:04:05Z")


def apply(
    control_plane: ControlPlane, manifests: Iterable[Manifest], *flags: str
) -> list[Manifest]:
    """Server-side apply as the operator does it, unknown fields refused; returns what the API
    server made of the manifests.
    """
    content = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
    arguments = (
        "apply",
        "--server-side",
        "--field-manager=pdcluster-operator",
        "--validate=strict",
        "--output=json",
        "--filename=-",
    )
    answer = json.loads(control_plane.kubectl(*arguments, *flags, input=content))
    items: list[Manifest] = answer["items"] if answer["kind"] == "List" else [answer]
    return items


@pytest.mark.parametrize(
    "change",
    [*CASES.values(), EVERYTHING, OWN_ETCD],
    ids=[*CASES, "everything", "everything with its own etcd"],
)
def test_rendered_objects_are_accepted(
    control_plane: ControlPlane, namespace: str, change: Change
) -> None:
    manifests = everything(namespace, change)
    accepted = apply(control_plane, manifests, "--dry-run=server")

    assert [(each["kind"], each["metadata"]["name"]) for each in accepted] == [
        (each["kind"], each["metadata"]["name"]) for each in manifests
    ]
    for given, taken in zip(manifests, accepted, strict=True):
        assert lost(given, taken, f"{given['kind']} {given['metadata']['name']}") == []


def lost(given: Any, taken: Any, path: str) -> list[str]:
    """Paths of what was given and is not there any more; values may be written another way (2000m
    is 2).
    """
    if isinstance(given, dict) and isinstance(taken, dict):
        missing = [
            f"{path}.{key}"
            for key, value in given.items()
            if key not in taken and value not in ({}, [], None)
        ]
        return missing + [
            fault
            for key in given.keys() & taken.keys()
            for fault in lost(given[key], taken[key], f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(taken, list):
        missing = [] if len(given) == len(taken) else [path]
        return missing + [
            fault
            for index, pair in enumerate(zip(given, taken, strict=False))
            for fault in lost(*pair, f"{path}.{index}")
        ]
    return []


def test_applying_again_writes_nothing(control_plane: ControlPlane, namespace: str) -> None:
    stored = at("spec.discovery.etcd.storage", {"size": "1Gi"})
    manifests = everything(namespace, both(GOOD["hub"], stored))
    sized = [each for each in manifests if each["kind"] not in ("StatefulSet", "PDPoolScaler")]
    first = apply(control_plane, sized)
    second = apply(control_plane, sized)

    assert versions(first) == versions(second)


def versions(manifests: list[Manifest]) -> list[tuple[str, str]]:
    """Versions that a write changes: the generation, which controllers that write status leave
    alone, or else the version.
    """
    return [
        (each["kind"], each["metadata"].get("generation") or each["metadata"]["resourceVersion"])
        for each in manifests
    ]


def test_content_of_a_record_and_of_an_engine_file_can_never_change(
    control_plane: ControlPlane, namespace: str
) -> None:
    manifests = everything(namespace, GOOD["mixed"])
    record = next(
        each
        for each in manifests
        if each["kind"] == "ControllerRevision" and "mixed" in each["metadata"]["name"]
    )
    config = next(
        each for each in manifests if each["kind"] == "ConfigMap" and each.get("immutable")
    )
    apply(control_plane, [record, config])

    with pytest.raises(KubectlError, match=r"data: .*field is immutable"):
        apply(control_plane, [{**record, "data": {**record["data"], "image": "other:1"}}])
    with pytest.raises(KubectlError, match="immutable"):
        apply(control_plane, [{**config, "data": {"engine.yaml": "other: 1\n"}}])


def test_stateful_set_makes_pods_that_meet_the_restricted_standard(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    manifests = everything(namespace, GOOD["hub"])
    kinds = ("StatefulSet", "Deployment")
    pods = [pod_of(each) for each in manifests if each["kind"] in kinds]
    account = [each for each in manifests if each["kind"] == "ServiceAccount"]
    apply(control_plane, account)

    assert len(apply(control_plane, pods, "--dry-run=server")) == 3


def pod_of(stateful_set: Manifest) -> Manifest:
    """A pod as the controller would make it, of what claims give aside."""
    template = stateful_set["spec"]["template"]
    metadata = {
        **template["metadata"],
        "name": stateful_set["metadata"]["name"],
        "namespace": stateful_set["metadata"]["namespace"],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize(
    ("retain", "owners"), [(False, ["StatefulSet"]), (True, [])], ids=["removed", "retained"]
)
def test_volumes_of_etcd_belong_to_its_stateful_set_unless_they_are_retained(
    control_plane: ControlPlane, namespace: str, retain: bool, owners: list[str]
) -> None:
    storage = at(
        "spec.discovery.etcd", {"replicas": 3, "storage": {"size": "1Gi", "retain": retain}}
    )
    manifests = everything(namespace, storage)
    wanted = [
        each
        for each in manifests
        if each["metadata"]["name"] == "chat-etcd" and each["kind"] in ("StatefulSet", "Service")
    ]
    apply(
        control_plane, [*(each for each in manifests if each["kind"] == "ServiceAccount"), *wanted]
    )

    def claims() -> list[Manifest]:
        found: list[Manifest] = json.loads(
            control_plane.kubectl("get", "pvc", "--namespace", namespace, "--output=json")
        )["items"]
        return found

    def owners_of_claims() -> list[list[str]]:
        return [
            [owner["kind"] for owner in claim["metadata"].get("ownerReferences", [])]
            for claim in claims()
        ]

    wait_for(lambda: owners_of_claims() == [owners] * 3, 30, lambda: owners_of_claims())


def test_wrong_template_is_refused_with_the_field_named(
    control_plane: ControlPlane, namespace: str
) -> None:
    wrong = at("spec.podTemplate", {"spec": {"containers": [{"image": "nameless:1"}]}})
    manifests = [
        each
        for each in everything(namespace, wrong)
        if each["kind"] == "StatefulSet" and "prefill" in each["metadata"]["name"]
    ]

    with pytest.raises(KubectlError, match=r"containers.*name"):
        apply(control_plane, manifests, "--dry-run=server")


def test_kubectl_takes_what_pdctl_renders_of_every_example(
    control_plane: ControlPlane, namespace: str
) -> None:
    rendered = CliRunner().invoke(app, ["render", "-n", namespace, *map(str, EXAMPLES)])
    assert rendered.exit_code == 0, rendered.output

    flags = ("--dry-run=server", "--validate=strict", "--output=name", "--filename=-")
    taken = control_plane.kubectl("apply", *flags, input=rendered.stdout).splitlines()
    assert len(taken) == rendered.stdout.count("\n---\n")
