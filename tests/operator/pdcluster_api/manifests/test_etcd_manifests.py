"""A managed etcd: one or three members, in memory or on volumes, never restarted by a newer
operator.
"""

import copy
import json
from dataclasses import replace

import pytest

from pdcluster_api.manifests.render import Manifest, RenderSettings, etcd_record_name, render_shared
from pdcluster_schema.service import EtcdSpec
from tests.operator.pdcluster_api.manifests.rendering import (
    OWNER,
    SITE,
    cluster_of,
    matches,
    shared_of,
)
from tests.schema.object_cases import Change, at, both

THREE = at("spec.discovery.etcd", {"replicas": 3, "storage": {"size": "2Gi", "className": "fast"}})
KEPT = at("spec.discovery.etcd", {"storage": {"size": "2Gi", "retain": True}})
KINDS = ("Deployment", "StatefulSet")


def runs_etcd(*changes: Change) -> Manifest:
    """Spec of the Deployment, or of the StatefulSet, that runs it."""
    shared = shared_of(*changes)
    kinds = [kind for kind, name in shared if name == "chat-etcd" and kind in KINDS]
    assert len(kinds) == 1
    spec: Manifest = shared[kinds[0], "chat-etcd"]["spec"]
    return spec


def flags(*changes: Change) -> dict[str, str]:
    command = runs_etcd(*changes)["template"]["spec"]["containers"][0]["command"]
    return dict(flag.removeprefix("--").split("=", 1) for flag in command[1:])


def rendered(
    site: RenderSettings, *changes: Change, records: tuple[Manifest, ...] = ()
) -> dict[tuple[str, str], Manifest]:
    manifests = render_shared(cluster_of(*changes), OWNER, site, "0a1b2c3d", records=records)
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def test_memory_of_the_volume_leaves_room_for_the_process() -> None:
    pod = runs_etcd()["template"]["spec"]
    sizes = [
        pod["volumes"][0]["emptyDir"]["sizeLimit"],
        pod["containers"][0]["resources"]["limits"]["memory"],
    ]
    volume, limit = (int(size.removesuffix("Mi")) for size in sizes)

    assert int(flags()["quota-backend-bytes"]) >> 20 < volume < limit


def test_room_grows_with_the_workers_that_there_may_be() -> None:
    many = both(
        at("spec.roles.prefill.pools.0.replicas", 1024),
        at(
            "spec.roles.decode.pools",
            [
                {"name": "a", "replicas": 1, "maxReplicas": 1024},
                {"name": "b", "replicas": 1024},
            ],
        ),
    )
    quota, more = (int(flags(*each)["quota-backend-bytes"]) >> 20 for each in ((), (many,)))

    assert (quota, more) == (128, 192)


@pytest.mark.parametrize(
    ("change", "when_deleted"), [(THREE, "Delete"), (KEPT, "Retain")], ids=["removed", "retained"]
)
def test_volumes_go_with_the_cluster_unless_they_are_to_be_kept(
    change: Change, when_deleted: str
) -> None:
    assert runs_etcd(change)["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == when_deleted


def test_clients_get_ready_members_and_peers_all_of_them() -> None:
    shared = shared_of(THREE)
    clients, peers = (
        shared["Service", "chat-etcd"]["spec"],
        shared["Service", "chat-etcd-peers"]["spec"],
    )
    labels = runs_etcd(THREE)["template"]["metadata"]["labels"]

    assert [port["port"] for port in clients["ports"]] == [2379]
    assert (clients["type"], "publishNotReadyAddresses" in clients) == ("ClusterIP", False)
    assert (peers["clusterIP"], peers["publishNotReadyAddresses"]) == ("None", True)
    assert runs_etcd(THREE)["serviceName"] == "chat-etcd-peers"
    for spec in (clients["selector"], peers["selector"], runs_etcd(THREE)["selector"]):
        assert matches(spec, labels)


def test_budget_is_for_three_only() -> None:
    assert ("PodDisruptionBudget", "chat-etcd") not in shared_of()
    budget = shared_of(THREE)["PodDisruptionBudget", "chat-etcd"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert matches(budget["selector"], runs_etcd(THREE)["template"]["metadata"]["labels"])


def test_newer_operator_restarts_no_etcd() -> None:
    record = rendered(SITE)["ControllerRevision", etcd_record_name(cluster_of())]
    stored = json.loads(json.dumps(record))
    newer = replace(SITE, etcd_image="etcd:2", cluster_domain="example.org")

    assert rendered(newer, records=(stored,)) == rendered(SITE)
    assert rendered(newer) != rendered(SITE)


def test_record_is_not_changed_by_its_use() -> None:
    record = rendered(SITE)["ControllerRevision", etcd_record_name(cluster_of())]
    before = copy.deepcopy(record)
    assert rendered(SITE, records=(record,)) == rendered(SITE, records=(record,))

    assert record == before


def test_operator_that_knows_one_more_field_finds_the_record_again() -> None:
    class NewerEtcdSpec(EtcdSpec):
        newest: int = 7

    cluster = cluster_of(THREE)
    etcd = NewerEtcdSpec.model_construct(**dict(cluster.spec.discovery.etcd))
    discovery = cluster.spec.discovery.model_copy(update={"etcd": etcd})
    newer = cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"discovery": discovery})}
    )

    assert newer.spec.discovery.etcd.model_dump()["newest"] == 7
    assert etcd_record_name(newer) == etcd_record_name(cluster)


def test_another_spec_makes_another_record() -> None:
    old = rendered(SITE)["ControllerRevision", etcd_record_name(cluster_of())]
    other = at("spec.discovery.etcd.image", "mine:3.6")

    assert etcd_record_name(cluster_of(other)) != etcd_record_name(cluster_of())
    assert rendered(SITE, other, records=(old,)) == rendered(SITE, other)


def test_the_stateful_set_of_an_older_operator_is_followed_by_a_deployment() -> None:
    name = "chat-etcd-44136fa3"  # as that operator named it
    older = {"statefulSet": {"spec": {"replicas": 1}}}
    record = {"metadata": {"name": name}, "data": older}
    made = rendered(SITE, records=(record,))

    assert made == rendered(SITE)
    assert not [kind for kind, _ in made if kind == "StatefulSet"]
    assert name not in {each for _, each in made}
