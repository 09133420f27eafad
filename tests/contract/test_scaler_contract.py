"""crds/pdpoolscaler.yaml and the operator say the same of a scaler, and both CRDs of the group they
share.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_api.manifests.access import KIND, render_scaler
from pdcluster_api.manifests.objects import OWNER_API_VERSION, Owner
from pdcluster_schema.labels import GROUP, SEEN_REPLICAS
from pdcluster_schema.sections import RolesSpec

CRDS = Path(__file__).parents[2] / "crds"
CRD = yaml.safe_load((CRDS / "pdpoolscaler.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SPEC = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]


def test_scaler_is_of_the_kind_that_the_crd_defines() -> None:
    made = render_scaler(Owner("chat", "default", "0"), "decode", "cpu", replicas=3, seen=2)

    assert (made["apiVersion"], made["kind"]) == (
        f"{CRD['spec']['group']}/{VERSION['name']}",
        CRD["spec"]["names"]["kind"],
    )
    assert (made["apiVersion"], made["kind"]) == (OWNER_API_VERSION, KIND)
    assert set(made["spec"]) == set(SPEC["properties"]) == set(SPEC["required"])
    assert made["metadata"]["annotations"] == {SEEN_REPLICAS: "2"}


def test_scale_reads_and_writes_fields_of_the_schema() -> None:
    scale = VERSION["subresources"]["scale"]
    properties: dict[str, Any] = {
        "properties": {
            "spec": SPEC,
            "status": VERSION["schema"]["openAPIV3Schema"]["properties"]["status"],
        }
    }
    for path in scale.values():
        found = properties
        for part in path.removeprefix(".").split("."):
            found = found["properties"][part]
        assert found["description"]
    assert scale["specReplicasPath"] == ".spec.replicas"


def test_scaler_roles_are_those_of_a_cluster() -> None:
    roles = [field.alias for field in RolesSpec.model_fields.values()]

    assert SPEC["properties"]["role"]["enum"] == roles


@pytest.mark.parametrize("path", sorted(CRDS.glob("*.yaml")), ids=lambda path: path.name)
def test_crds_are_of_one_group_and_version(path: Path) -> None:
    crd = yaml.safe_load(path.read_text())

    assert crd["spec"]["group"] == GROUP
    assert crd["metadata"]["name"] == f"{crd['spec']['names']['plural']}.{GROUP}"
    assert [version["name"] for version in crd["spec"]["versions"]] == [
        OWNER_API_VERSION.partition("/")[2]
    ]
    assert "status" in crd["spec"]["versions"][0]["subresources"]
