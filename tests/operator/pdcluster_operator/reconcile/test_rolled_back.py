"""A spec that was rolled back: what runs stays as its snapshots have it, whatever the spec says."""

from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.plan.gates import Gate, gate_field
from pdcluster_api.rendering import Records
from pdcluster_schema.labels import ROLLOUT
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import is_rolled_back, revision_of, rollout_name, templates_of
from tests.operator import bodies as made
from tests.operator.pdcluster_operator.reconcile.spec_manifests import (
    OWNER,
    changed,
    cluster,
    live,
    workloads,
)

SINCE = "2026-01-02T03:04:05Z"
OTHER = {"engine": {"maxSequences": 65}}


def given_up(before: list[made.Body], spec: PDCluster, **gate: Any) -> Live:
    """Objects that run, with the status of a roll out to a spec that went back."""
    found = live(before)
    bound = as_it_runs(spec, found)
    known = {"revision": rollout_name(bound.spec), "since": SINCE, **gate}
    status = gate_field(Gate(**{"state": "RolledBack", "reason": "GateFailed", **known}))
    return Live({**found.body, "status": status}, found.children)


def test_objects_stay_as_they_were_under_the_spec_that_was_given_up() -> None:
    old, new = cluster(), cluster(**OTHER)
    before = workloads(live([]), old)
    found = given_up(before, new, to=revision_of(old.spec))

    bound = as_it_runs(new, found)

    assert is_rolled_back(bound.spec)
    assert revision_of(bound.spec) == revision_of(old.spec)
    names = {name for _, name in changed(before, workloads(found, new))}
    assert not {name for name in names if "router" not in name}


def test_a_role_that_went_back_alone_keeps_its_template() -> None:
    old = cluster()
    new = cluster(cpu=2)
    before = workloads(live([]), old)
    assert templates_of(as_it_runs(new, live(before)).spec)
    found = given_up(before, new, to=revision_of(old.spec))

    bound = as_it_runs(new, found)

    assert (revision_of(bound.spec), dict(templates_of(bound.spec))) == (revision_of(old.spec), {})
    assert changed(before, workloads(found, new)) == set()


def test_routers_stay_as_they_were_too() -> None:
    """Though what is declared of them has changed with the spec that was given up."""
    old, new = cluster(), cluster(**OTHER, router={"resources": {"limits": {"cpu": 2}}})
    before = workloads(live([]), old)
    found = given_up(before, new, to=revision_of(old.spec))

    after = workloads(found, new)

    assert changed(before, after) == set()


@pytest.mark.parametrize(
    "gate", [{"state": "Failed"}, {"to": "0badcafe"}, {"revision": "0badcafe"}]
)
def test_any_other_gate_changes_nothing(gate: dict[str, Any]) -> None:
    old, new = cluster(), cluster(**OTHER)
    before = workloads(live([]), old)
    found = given_up(before, new, **{"to": revision_of(old.spec), **gate})

    assert not is_rolled_back(as_it_runs(new, found).spec)


def test_a_command_to_resume_tries_the_spec_once_more() -> None:
    old, new = cluster(), cluster(**OTHER)
    found = given_up(workloads(live([]), old), new, to=revision_of(old.spec))
    metadata = {**found.body["metadata"], "annotations": {ROLLOUT: f"resume {SINCE}"}}
    resumed = Live({**found.body, "metadata": metadata}, found.children)

    assert not is_rolled_back(as_it_runs(new, resumed).spec)


def test_another_number_of_accelerators_makes_no_workload_outdated() -> None:
    old, new = cluster(), cluster(**OTHER)
    found = given_up(workloads(live([]), old), new, to=revision_of(old.spec))
    bound = as_it_runs(new, found)

    assert Records(bound, found, OWNER).outdated() == frozenset()
