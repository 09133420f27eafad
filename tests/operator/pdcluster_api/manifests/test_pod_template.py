"""Parts of the user's pod templates that reach the pods of each role."""

from typing import Any

import pytest

from pdcluster_api.manifests.objects import Manifest
from tests.operator.pdcluster_api.manifests.rendering import by_name, pod_of
from tests.schema.object_cases import HUB, Change, at, both, vllm

ROUTER = at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]})
ON_GPU = at("spec.roles.decode.pools.0.gpu", "H100")
CLAIM = {"name": "nic", "resourceClaimTemplateName": "nic"}


def template(spec: dict[str, Any], role: str | None = None) -> Change:
    place = f"spec.roles.{role}.podTemplate" if role else "spec.podTemplate"
    return at(f"{place}.spec", spec)


ENGINE = template({"initContainers": [{"name": "engine", "resources": {"limits": {"a/b": "1"}}}]})


def init_containers(*changes: Change, role: str = "decode") -> list[Manifest]:
    found: list[Manifest] = pod_of(ROUTER, *changes, role=role)["spec"].get("initContainers", [])
    return found


def test_engine_is_patched_where_there_is_one() -> None:
    changes = (vllm(), at("spec.model", HUB), ENGINE)

    for role in ("prefill", "decode"):
        engine = by_name(init_containers(*changes, role=role))["engine"]
        assert engine["resources"]["limits"]["a/b"] == "1"
        assert engine["image"]
    assert [each["name"] for each in init_containers(*changes, role="router")] == ["fetch-model"]


def test_every_container_has_an_image_in_every_role() -> None:
    wait = {"initContainers": [{"name": "wait", "image": "busybox"}]}
    changes = (ENGINE, template(wait, "decode"))

    for role in ("prefill", "decode", "router"):
        assert all(each["image"] for each in init_containers(*changes, role=role))


def test_init_containers_of_the_user_end_before_the_engine_starts() -> None:
    own = {"name": "check-nic", "image": "tools:1"}
    changes = (vllm(), at("spec.model", HUB), template({"initContainers": [own]}))
    late = template({"initContainers": [{"name": "warm", "image": "tools:1"}]}, "decode")

    names = [each["name"] for each in init_containers(*changes, late)]
    assert names == ["fetch-model", "check-nic", "warm", "engine"]


DEVICES = template(
    {
        "runtimeClassName": "nvidia",
        "resourceClaims": [CLAIM],
        "containers": [{"name": "worker", "resources": {"claims": [{"name": "nic"}]}}],
    }
)


def test_accelerators_of_the_engines_are_not_a_routers() -> None:
    decode = pod_of(ROUTER, ON_GPU, DEVICES)["spec"]
    router = pod_of(ROUTER, ON_GPU, DEVICES, role="router")["spec"]

    assert (decode["runtimeClassName"], decode["resourceClaims"]) == ("nvidia", [CLAIM])
    assert by_name(decode["containers"])["worker"]["resources"]["claims"] == [{"name": "nic"}]
    assert not {"runtimeClassName", "resourceClaims"} & router.keys()
    assert "claims" not in by_name(router["containers"])["worker"]["resources"]


def test_runtime_class_of_a_cluster_on_cpus_is_a_sandbox_for_all() -> None:
    assert pod_of(ROUTER, DEVICES, role="router")["spec"]["runtimeClassName"] == "nvidia"


def test_own_template_of_the_routers_counts_as_it_is() -> None:
    own = template({"runtimeClassName": "gvisor", "resourceClaims": [CLAIM]}, "router")
    router = pod_of(both(ROUTER, own), ON_GPU, DEVICES, role="router")["spec"]

    assert (router["runtimeClassName"], router["resourceClaims"]) == ("gvisor", [CLAIM])


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"initContainers": "x", "containers": [1, None, {"resources": "x"}]},
        {"initContainers": [1, "x"], "containers": None},
    ],
    ids=["empty", "lists", "items"],
)
@pytest.mark.parametrize("role", ["decode", "router"])
@pytest.mark.parametrize("engine", [at("spec.engine", {}), vllm()], ids=["own", "vllm"])
def test_what_is_no_pod_is_left_to_the_api_server(spec: Any, role: str, engine: Change) -> None:
    pod_of(ROUTER, engine, template(spec), role=role)
