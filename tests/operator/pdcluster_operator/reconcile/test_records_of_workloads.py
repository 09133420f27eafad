"""Records: found ones are kept, lost ones are made from what runs, new ones take the image of their
siblings.
"""

import json
from typing import Any

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.manifests.render import image_of_record, render_record, render_workload
from pdcluster_api.rendering import Records
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
POOL = {"pools": [{"name": "cpu", "replicas": 1}]}
SPEC = {
    "model": {"name": "tiny", "path": "/models/tiny"},
    "roles": {"prefill": POOL, "decode": POOL},
}


def cluster(**changes: Any) -> PDCluster:
    return parse(made.cluster(spec={**SPEC, **changes}))


def workload(role: str, revision: str | None = None) -> WorkloadId:
    return WorkloadId(made.NAME, role, "cpu", revision or revision_of(cluster().spec))


def records(
    *children: made.Body, spec: PDCluster | None = None, has_client_certificate: bool | None = False
) -> Records:
    bodies = [json.loads(json.dumps(child)) for child in children]
    return Records(
        spec or cluster(), Live(made.cluster(), bodies), OWNER, "default:2", has_client_certificate
    )


def test_a_found_record_is_kept_as_it_is():
    found = render_record(cluster(), workload("decode"), OWNER, "first:1")
    assert records(found).of(workload("decode")) == found


def test_a_new_record_takes_the_image_of_the_spec_else_of_its_siblings_else_the_default():
    sibling = render_record(cluster(), workload("prefill"), OWNER, "first:1")
    named = cluster(image={"name": "named:3"})
    of_named = workload("decode", revision_of(named.spec))
    found = [
        records().of(workload("decode")),
        records(sibling).of(workload("decode")),
        records(sibling, spec=named).of(of_named),
    ]
    assert [record and image_of_record(record) for record in found] == [
        "default:2",
        "first:1",
        "named:3",
    ]


def test_a_sibling_of_another_revision_says_nothing_of_the_image():
    named = cluster(image={"name": "named:3"})
    old = render_record(named, workload("prefill", revision_of(named.spec)), OWNER, "named:3")
    record = records(old).of(workload("decode"))
    assert record is not None
    assert image_of_record(record) == "default:2"


def test_a_lost_record_is_made_from_what_runs_and_makes_the_same_again():
    first = render_record(cluster(), workload("decode"), OWNER, "first:1")
    running = render_workload(first, 3, OWNER)
    # of an old revision too, which the spec knows nothing of any more
    for role_revision in (None, "0ddba110"):
        identity = workload("decode", role_revision)
        named = [
            {**body, "metadata": {**body["metadata"], "name": identity.name}} for body in running
        ]
        record = records(*named).of(identity)
        assert record is not None
        assert image_of_record(record) == "first:1"
        assert [body["metadata"]["name"] for body in render_workload(record, 3, OWNER)] == [
            identity.name
        ] * 2
        assert [body.get("spec") or body["data"] for body in render_workload(record, 3, OWNER)] == [
            body.get("spec") or body["data"] for body in running
        ]


def test_a_workload_of_an_old_revision_with_nothing_left_of_it_cannot_be_made():
    assert records().of(workload("decode", "0ddba110")) is None


def test_a_workload_of_a_pool_or_role_that_is_no_longer_declared_cannot_be_made():
    revision = revision_of(cluster().spec)
    for role, pool in (("decode", "gone"), ("mixed", "cpu")):
        assert records().of(WorkloadId(made.NAME, role, pool, revision)) is None


def test_no_record_is_made_while_the_etcds_secret_is_not_known():
    unknown = records(has_client_certificate=None)
    assert unknown.of(workload("decode")) is None
    assert unknown.is_missing(workload("decode"))
    found = render_record(cluster(), workload("decode"), OWNER, "first:1")
    assert not records(found, has_client_certificate=None).is_missing(workload("decode"))


OTHER_GPU = {"prefill": POOL, "decode": {"pools": [{"name": "cpu", "gpu": "B200", "replicas": 1}]}}


def test_a_pool_that_came_back_with_another_gpu_makes_the_old_record_outdated():
    old = render_record(cluster(), workload("decode"), OWNER, "first:1")
    again = cluster(roles=OTHER_GPU)
    # which pools there are is no part of it
    assert revision_of(again.spec) == workload("decode").revision
    assert records(old).outdated() == frozenset()
    assert records(old, spec=again).outdated() == {workload("decode")}


def test_a_pool_that_came_back_with_another_number_makes_the_old_record_outdated():
    def of(**number: int) -> Any:
        pools = [{"name": "cpu", "gpu": "B200", "replicas": 1, **number}]
        return cluster(roles={"prefill": POOL, "decode": {"pools": pools}})

    old = render_record(of(), workload("decode"), OWNER, "first:1")
    assert records(old, spec=of(gpusPerReplica=1)).outdated() == frozenset()
    assert records(old, spec=of(gpusPerReplica=8)).outdated() == {workload("decode")}
    del old["data"]["pool"]["gpusPerReplica"]  # as an older operator made it
    assert records(old, spec=of(gpusPerReplica=8)).outdated() == frozenset()


def test_a_workload_that_lost_its_record_is_known_by_its_engine_file():
    running = render_workload(
        render_record(cluster(), workload("decode"), OWNER, "first:1"), 1, OWNER
    )
    assert records(*running).outdated() == frozenset()
    assert records(*running, spec=cluster(roles=OTHER_GPU)).outdated() == {workload("decode")}
    unreadable = {**running[1], "data": {"engine.yaml": "a: ["}}
    assert records(running[0], unreadable, spec=cluster(roles=OTHER_GPU)).outdated() == frozenset()


OF_ONES_OWN = {"prefill": POOL, "decode": {"pools": [{"name": "cpu", "gpu": "X1", "replicas": 1}]}}


def test_another_definition_of_a_pools_own_accelerator_makes_its_record_outdated():
    first = cluster(roles=OF_ONES_OWN, accelerators={"X1": {"resource": "x.io/gpu"}})
    old = render_record(first, workload("decode"), OWNER, "first:1")
    for unrelated in ({}, {"X2": {"resource": "x.io/two"}}, {"B200": {"nodeLabels": {"a": "b"}}}):
        again = cluster(
            roles=OF_ONES_OWN, accelerators={"X1": {"resource": "x.io/gpu"}, **unrelated}
        )
        assert records(old, spec=again).outdated() == frozenset()
    for other in ({"resource": "x.io/other"}, {"resource": "x.io/gpu", "nodeLabels": {"a": "b"}}):
        again = cluster(roles=OF_ONES_OWN, accelerators={"X1": other})
        assert revision_of(again.spec) == workload("decode").revision
        assert records(old, spec=again).outdated() == {workload("decode")}


def test_a_definition_over_the_table_of_accelerators_counts_as_another():
    known = cluster(roles=OTHER_GPU)
    old = render_record(known, workload("decode"), OWNER, "first:1")
    over = cluster(roles=OTHER_GPU, accelerators={"B200": {"resource": "x.io/gpu"}})
    assert (records(old, spec=known).outdated(), records(old, spec=over).outdated()) == (
        frozenset(),
        {workload("decode")},
    )


def test_size_and_bounds_of_a_pool_make_no_record_outdated():
    old = render_record(cluster(), workload("decode"), OWNER, "first:1")
    bigger = cluster(
        roles={
            "prefill": POOL,
            "decode": {
                "pools": [{"name": "cpu", "replicas": 5, "minReplicas": 1, "maxReplicas": 9}]
            },
        }
    )
    assert records(old, spec=bigger).outdated() == frozenset()


def test_a_record_of_another_operator_is_compared_in_what_both_know():
    old = json.loads(json.dumps(render_record(cluster(), workload("decode"), OWNER, "first:1")))
    old["data"]["pool"] = {"gpu": "cpu", "memory": "of a newer operator"}
    assert records(old).outdated() == frozenset()
    del old["data"]["pool"]
    assert records(old, spec=cluster(roles=OTHER_GPU)).outdated() == frozenset()


def test_an_older_revision_of_a_pool_with_another_gpu_goes_on():
    old = workload("decode", "0ddba110")
    record = render_record(cluster(), workload("decode"), OWNER, "first:1")
    named = {**record, "metadata": {**record["metadata"], "name": old.name}}
    assert records(named, spec=cluster(roles=OTHER_GPU)).outdated() == frozenset()
