"""Members of a cluster: etcd's listing, and a probe when it reports that one is gone."""

from collections.abc import Callable

import msgspec

from pdcluster_worker.peers.membership import Membership
from pdcluster_worker.peers.records import WorkerRecord

Make = Callable[..., WorkerRecord]


def members_of(*records: WorkerRecord) -> Membership:
    membership = Membership()
    membership.resync({record.pod: record for record in records})
    return membership


def test_membership_takes_a_listing_and_reports_whether_it_changed(record: Make) -> None:
    membership = Membership()

    assert membership.resync({"a": record("a")})
    assert not membership.resync({"a": record("a")})
    assert membership.resync({"a": record("a", state="draining")})
    assert membership.records == {"a": record("a", state="draining")}


def test_member_that_an_empty_listing_lacks_stays_and_is_missing(record: Make) -> None:
    membership = members_of(record("a"), record("b"))

    assert not membership.resync({})
    assert membership.missing == [record("a"), record("b")]
    assert set(membership.records) == {"a", "b"}


def test_missing_member_that_writes_itself_again_is_a_member_again(record: Make) -> None:
    membership = members_of(record("a"))
    membership.delete("a")

    assert not membership.put(record("a"))
    assert membership.missing == []


def test_missing_member_goes_when_its_probe_failed(record: Make) -> None:
    membership = members_of(record("a"), record("b"))
    membership.delete("a")

    assert membership.remove(record("a"))
    assert set(membership.records) == {"b"}
    assert membership.missing == []


def test_probe_of_an_older_record_removes_no_peer(record: Make) -> None:
    membership = members_of(record("a"))
    membership.delete("a")
    restarted = msgspec.structs.replace(record("a"), engine_id="e2")
    membership.put(restarted)
    membership.delete("a")

    assert not membership.remove(record("a"))
    assert membership.missing == [restarted]


def test_drained_member_goes_without_a_probe(record: Make) -> None:
    membership = members_of(record("a", state="drained"))

    assert membership.delete("a")
    assert membership.records == {}


def test_delete_of_an_unknown_pod_changes_nothing(record: Make) -> None:
    membership = members_of(record("a"))

    assert not membership.delete("x")
    assert membership.missing == []
