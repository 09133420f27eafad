"""Sections that have an effect on Kubernetes alone: accepted by `pdctl up`, named in a line, and
edited without a restart.
"""

from typing import Any

import pytest

from pdcluster_schema.load import parse
from pdctl.local.ineffective import ineffective_remarks
from pdctl.local.policy import restart_fields
from tests.schema.object_cases import at

IDLE = {
    "volume": (
        at("spec.model", {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models"}}),
        "spec.model.pvc has no effect here: there are no volumes here",
    ),
    "hub": (
        at(
            "spec.model",
            {"name": "tiny", "huggingFace": {"repo": "a/b"}, "nodeCache": "/var/models"},
        ),
        "spec.model.huggingFace, spec.model.nodeCache have no effect here: nothing is downloaded "
        "here",
    ),
    "image": (
        at("spec.image", {"name": "llm:1"}),
        "spec.image has no effect here: workers are processes of this installation",
    ),
    "image of a stock engine": (
        at("spec.roles.decode.engine", {"image": "vllm:1"}),
        "spec.roles.decode.engine.image has no effect here: a stock engine is a program of this "
        "machine",
    ),
    "resources": (
        at("spec.roles.decode.resources", {"limits": {"cpu": "2"}}),
        "spec.roles.decode.resources has no effect here: a process may take what the machine has",
    ),
    "template": (
        at("spec.podTemplate", {"spec": {}}),
        "spec.podTemplate has no effect here: there are no pods here",
    ),
    "template of a role": (
        at("spec.roles.prefill.podTemplate", {"spec": {}}),
        "spec.roles.prefill.podTemplate has no effect here: there are no pods here",
    ),
    "accelerators": (
        at("spec.accelerators", {"B100": {}}),
        "spec.accelerators has no effect here: no node is chosen here",
    ),
    "etcd": (
        at("spec.discovery.etcd", {"replicas": 3, "storage": {"size": "1Gi"}}),
        "spec.discovery.etcd.replicas, spec.discovery.etcd.storage have no effect here:"
        " an etcd that is run here is one process, whose data is lost with the run",
    ),
    "service": (
        at("spec.service", {"type": "LoadBalancer", "annotations": {"a": "b"}}),
        "spec.service.type, spec.service.annotations have no effect here: there is no Service "
        "here: the API is at 127.0.0.1",
    ),
    "endpoint picker": (
        at("spec.service.endpointPicker", {"name": "picker"}),
        "spec.service.endpointPicker has no effect here: there is no gateway here: the API is at "
        "127.0.0.1",
    ),
    "keys": (
        at("spec.service.apiKeySecret", "keys"),
        "spec.service.apiKeySecret has no effect here:"
        " there are no Secrets here: no key is asked for, and only this machine reaches the API",
    ),
    "placement": (
        at("spec.placement", {"domainLabel": "rack"}),
        "spec.placement.domainLabel has no effect here: all workers are on this machine",
    ),
    "rollout": (
        at("spec.rollout", {"strategy": "Recreate"}),
        "spec.rollout has no effect here: there is one revision, and workers have a minute to "
        "finish their streams",
    ),
    "network policy": (
        at("spec.networkPolicy.enabled", False),
        "spec.networkPolicy has no effect here: workers listen on 127.0.0.1 alone",
    ),
    "autoscaler": (
        at("spec.autoscale", {"mode": "Advise"}),
        "autoscale.mode is Advise, and pdctl up does not scale:"
        " every pool runs its `replicas`; `pdctl autoscale replay` tries it on a trace",
    ),
}


@pytest.mark.parametrize(("change", "line"), IDLE.values(), ids=IDLE.keys())
def test_a_section_without_effect_is_one_line(
    change: Any, line: str, document: dict[str, Any]
) -> None:
    change(document)
    if "stock" in line:
        at("spec.engine.type", "vllm")(document)

    assert ineffective_remarks(parse(document)) == [line]


@pytest.mark.parametrize("case", [case for case in IDLE if case not in ("volume", "hub")])
def test_an_edit_of_it_needs_no_restart(case: str, document: dict[str, Any]) -> None:
    """But of the model, whose folder was found by all of it."""
    if "stock" in case:
        at("spec.engine.type", "vllm")(document)
    before = parse(document)
    IDLE[case][0](document)

    assert restart_fields(before, parse(document)) == []


@pytest.mark.parametrize(
    "change",
    [
        at("spec.service.type", "ClusterIP"),
        at("spec.rollout", {"strategy": "BlueGreen"}),
        at("spec.image", {}),
        at("spec.service.port", 1),
    ],
)
def test_defaults_and_what_has_an_effect_are_not_reported(
    change: Any, document: dict[str, Any]
) -> None:
    change(document)

    assert ineffective_remarks(parse(document)) == []


def test_resources_and_template_of_routers_are_idle_too(document: dict[str, Any]) -> None:
    at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]})(document)
    before = parse(document)
    at("spec.roles.router.resources", {"limits": {"cpu": "2"}})(document)
    at("spec.roles.router.podTemplate", {"spec": {}})(document)

    assert restart_fields(before, parse(document)) == []
    assert ineffective_remarks(parse(document)) == [
        "spec.roles.router.resources has no effect here: a process may take what the machine has",
        "spec.roles.router.podTemplate has no effect here: there are no pods here",
    ]
