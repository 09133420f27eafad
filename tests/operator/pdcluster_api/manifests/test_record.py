"""A record is rendered once and is the only source of its workload."""

import copy
import json
from dataclasses import replace

import pytest

from pdcluster_api.manifests.render import image_of_record, render_record, render_workload
from pdcluster_schema.load import parse
from tests.operator.pdcluster_api.manifests.rendering import (
    OWNER,
    SITE,
    cluster_of,
    engine_of,
    pod_of,
    record_of,
    workload_of,
)
from tests.schema.object_cases import GOOD, Change, at, minimal

TLS_FILES = {"ca": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
OWN_ETCD = {"endpoints": ["etcd.example:2379"], "tlsSecret": "etcd-client"}


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_record_is_stable_and_survives_json(change: Change) -> None:
    document = minimal()
    change(document)
    cluster = parse(document)
    owner = replace(OWNER, name=cluster.metadata.name)
    for role, spec in cluster.spec.roles.present().items():
        for pool in spec.pools:
            workload = workload_of(cluster, role, pool.name)
            record = render_record(cluster, workload, owner, "worker:1")
            assert record == render_record(cluster, workload, owner, "worker:1")
            stored = json.loads(json.dumps(record))
            assert stored == record
            assert render_workload(stored, 3, owner) == render_workload(record, 3, owner)


def test_workload_is_made_from_the_record_alone() -> None:
    record = record_of()
    record["data"]["statefulSet"]["spec"]["revisionHistoryLimit"] = 7
    record["data"]["engineConfig"]["data"] = {"engine.yaml": "as it was: then\n"}
    stateful_set, config = render_workload(record, 5, OWNER)

    assert stateful_set["spec"]["replicas"] == 5
    assert stateful_set["spec"]["revisionHistoryLimit"] == 7
    assert config["data"] == {"engine.yaml": "as it was: then\n"}
    assert config["immutable"] is True


def test_record_has_no_replicas_and_is_not_changed_by_its_use() -> None:
    record = record_of()
    before = copy.deepcopy(record)
    assert render_workload(record, 5, OWNER) == render_workload(record, 5, OWNER)

    assert record == before
    assert "replicas" not in record["data"]["statefulSet"]["spec"]


def test_image_of_record_is_the_resolved_one_under_any_template() -> None:
    other = at(
        "spec.roles.decode.podTemplate",
        {"spec": {"containers": [{"name": "worker", "image": "mine:2"}]}},
    )

    assert image_of_record(record_of(other)) == SITE.worker_image
    assert pod_of(other)["spec"]["containers"][0]["image"] == "mine:2"


def test_record_of_an_older_revision_is_not_rendered() -> None:
    cluster = cluster_of()
    with pytest.raises(AssertionError, match="newest spec"):
        render_record(
            cluster, replace(workload_of(cluster), revision="00000000"), OWNER, "worker:1"
        )


def test_engine_file_of_an_external_etcd_over_tls() -> None:
    own = at("spec.discovery.etcd", OWN_ETCD)
    folder = "/etc/pdcluster/etcd-tls"

    assert engine_of(own)["discovery"] == {
        "endpoints": OWN_ETCD["endpoints"],
        "tls": {name: f"{folder}/{file}" for name, file in TLS_FILES.items()},
    }
    without = engine_of(own, etcd_client_certificate=False)["discovery"]["tls"]
    assert without == {"ca": f"{folder}/ca.crt"}


def test_engine_file_asks_for_api_keys_at_the_ingress_only() -> None:
    keys = at("spec.service.apiKeySecret", "keys")

    assert engine_of(keys)["listen"]["apiKeys"] == "/etc/pdcluster/api-keys"
    assert "apiKeys" not in engine_of(keys, role="prefill")["listen"]
