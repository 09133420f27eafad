"""Properties of every rendered object."""

from dataclasses import replace

import pytest

from pdcluster_api.manifests.render import Manifest, render_record, render_shared, render_workload
from pdcluster_schema.load import parse
from tests.operator.pdcluster_api.manifests.rendering import OWNER, SITE, workload_of
from tests.schema.object_cases import GOOD, Change, minimal


def everything(change: Change) -> list[Manifest]:
    document = minimal()
    change(document)
    cluster = parse(document)
    owner = replace(OWNER, name=cluster.metadata.name)
    manifests = list(render_shared(cluster, owner, SITE, "0a1b2c3d"))
    for role, spec in cluster.spec.roles.present().items():
        for pool in spec.pools:
            record = render_record(
                cluster, workload_of(cluster, role, pool.name), owner, "worker:1"
            )
            manifests += [record, *render_workload(record, pool.replicas, owner)]
    return manifests


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_every_object_is_ours_named_once_and_goes_with_its_owner(change: Change) -> None:
    manifests = everything(change)
    keys = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]

    assert len(set(keys)) == len(keys)
    for manifest in manifests:
        metadata = manifest["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (OWNER.uid, True)
        assert metadata["namespace"] == OWNER.namespace
        assert metadata["labels"]["pdcluster.io/cluster"] == owner["name"]
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "pdcluster-operator"
        assert len(metadata["name"]) <= 63
        assert max(len(value) for value in metadata["labels"].values()) <= 63


def test_rendering_twice_is_equal_and_shares_nothing() -> None:
    first, second = everything(GOOD["everything"]), everything(GOOD["everything"])
    assert first == second
    for manifest in first:
        manifest["metadata"]["labels"].clear()
    assert everything(GOOD["everything"]) == second


def test_traffic_moves_last() -> None:
    manifests = everything(GOOD["minimum"])
    shared = [
        manifest
        for manifest in manifests
        if "pdcluster.io/revision" not in manifest["metadata"]["labels"]
    ]

    assert (shared[-1]["kind"], shared[-1]["metadata"]["name"]) == ("Service", "chat")
