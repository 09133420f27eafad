"""Records: found ones are kept, lost ones are made from what runs, new ones take the image of their siblings."""

import json
from typing import Any

from pdcluster_operator.api.load import parse
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.api.revision import revision_of
from pdcluster_operator.api.workload import WorkloadId
from pdcluster_operator.cluster.observe import Live
from pdcluster_operator.manifests.objects import Owner
from pdcluster_operator.manifests.render import image_of_record, render_record, render_workload
from pdcluster_operator.reconcile.records import Records
from tests.operator.reconcile import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
POOL = {"pools": [{"name": "cpu", "replicas": 1}]}
SPEC = {"model": {"name": "tiny", "path": "/models/tiny"}, "roles": {"prefill": POOL, "decode": POOL}}


def cluster(**changes: Any) -> PDCluster:
    return parse(made.cluster(spec={**SPEC, **changes}))


def workload(role: str, revision: str | None = None) -> WorkloadId:
    return WorkloadId(made.NAME, role, "cpu", revision or revision_of(cluster().spec))


def records(*children: made.Body, spec: PDCluster | None = None, has_client_certificate: bool | None = False) -> Records:
    bodies = [json.loads(json.dumps(child)) for child in children]
    return Records(spec or cluster(), Live(made.cluster(), bodies), OWNER, "default:2", has_client_certificate)


def test_a_found_record_is_kept_as_it_is():
    found = render_record(cluster(), workload("decode"), OWNER, "first:1")
    assert records(found).of(workload("decode")) == found


def test_a_new_record_takes_the_image_of_the_spec_else_of_its_siblings_else_the_default():
    sibling = render_record(cluster(), workload("prefill"), OWNER, "first:1")
    named = cluster(image={"name": "named:3"})
    of_named = workload("decode", revision_of(named.spec))
    found = [records().of(workload("decode")), records(sibling).of(workload("decode")), records(sibling, spec=named).of(of_named)]
    assert [record and image_of_record(record) for record in found] == ["default:2", "first:1", "named:3"]


def test_a_sibling_of_another_revision_says_nothing_of_the_image():
    named = cluster(image={"name": "named:3"})
    old = render_record(named, workload("prefill", revision_of(named.spec)), OWNER, "named:3")
    record = records(old).of(workload("decode"))
    assert record is not None
    assert image_of_record(record) == "default:2"


def test_a_lost_record_is_made_from_what_runs_and_makes_the_same_again():
    first = render_record(cluster(), workload("decode"), OWNER, "first:1")
    running = render_workload(first, 3, OWNER)
    for role_revision in (None, "0ddba110"):  # of an old revision too, which the spec knows nothing of any more
        identity = workload("decode", role_revision)
        named = [{**body, "metadata": {**body["metadata"], "name": identity.name}} for body in running]
        record = records(*named).of(identity)
        assert record is not None
        assert image_of_record(record) == "first:1"
        assert [body["metadata"]["name"] for body in render_workload(record, 3, OWNER)] == [identity.name] * 2
        assert [body.get("spec") or body["data"] for body in render_workload(record, 3, OWNER)] == [
            body.get("spec") or body["data"] for body in running
        ]


def test_a_workload_of_an_old_revision_with_nothing_left_of_it_cannot_be_made():
    assert records().of(workload("decode", "0ddba110")) is None


def test_no_record_is_made_while_the_etcds_secret_is_not_known():
    unknown = records(has_client_certificate=None)
    assert unknown.of(workload("decode")) is None
    assert unknown.is_missing(workload("decode"))
    found = render_record(cluster(), workload("decode"), OWNER, "first:1")
    assert not records(found, has_client_certificate=None).is_missing(workload("decode"))
