"""Pods of lost nodes are deleted only where that is allowed and their node is given up."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError, UnavailableError
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_api.apiserver.observe import Live
from pdcluster_operator.reconcile.lost_pods import CHECK_SECONDS, Deleted, LostPods
from pdcluster_schema import conditions

Body = dict[str, Any]
TAINTED = "2026-01-02T03:04:05Z"
UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"


class OneNode:
    """An API server with the Node `n1`, or without."""

    def __init__(self, taint: str | None, error: ClusterError | None = None) -> None:
        self.deleted: list[Mapping[str, Any]] = []
        self.looks = 0
        self._taint, self._error = taint, error

    async def find(self, kind: Kind, namespace: str, name: str) -> Body | None:
        assert (kind.path(namespace, name), name) == (f"/api/v1/nodes/{name}", "n1")
        self.looks += 1
        taints = [{"key": self._taint, "effect": "NoExecute", "timeAdded": TAINTED}]
        return {"spec": {"taints": taints}} if self._taint else None

    async def delete(self, kind: Kind, namespace: str, name: str, **options: object) -> None:
        if self._error:
            raise self._error
        self.deleted.append({"kind": kind.name, "pod": f"{namespace}/{name}", **options})


def pod(name: str, node: str | None = "n1") -> Body:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}"}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node} if node else {}}


def deleted(api: OneNode, *bodies: Body, may_delete: bool = True) -> Deleted:
    live = Live({"metadata": {"name": "chat", "namespace": "default", "uid": "u"}}, bodies)
    lost = LostPods(cast("ApiClient", api), may_delete)
    return asyncio.run(lost.delete(live, {"lost-0", "lost-1"}))


@pytest.mark.parametrize("taint", [UNREACHABLE, None], ids=["unreachable", "no node object"])
def test_a_pod_of_a_node_that_is_given_up_goes_at_once_by_its_uid(taint: str | None):
    api = OneNode(taint)
    found = deleted(api, pod("lost-0"), pod("whole-0"))
    options = {"uid": "uid-lost-0", "grace_seconds": 0}
    assert api.deleted == [{"kind": "Pod", "pod": "default/lost-0", **options}]
    assert [(each.reason, each.warning) for each in found.events] == [
        (conditions.LOST_POD_DELETED, True)
    ]
    assert "pod lost-0" in found.events[0].message
    assert "node n1" in found.events[0].message
    assert (found.failures, found.requeue_after_seconds) == ((), None)


def test_a_pod_of_a_node_that_answers_is_left_and_looked_at_again():
    api = OneNode(NOT_READY)
    assert deleted(api, pod("lost-0")) == Deleted(requeue_after_seconds=CHECK_SECONDS)
    assert not api.deleted


def test_a_pod_that_a_finalizer_keeps_is_deleted_once():
    api, kept = OneNode(UNREACHABLE), pod("lost-0")
    assert len(deleted(api, kept).events) == 1
    kept["metadata"]["deletionGracePeriodSeconds"] = 0  # as the API server has it from then on
    assert deleted(api, kept) == Deleted()
    assert len(api.deleted) == 1


def test_without_the_setting_nothing_is_read_or_deleted():
    api = OneNode(UNREACHABLE)
    assert deleted(api, pod("lost-0"), may_delete=False) == Deleted()
    assert not api.deleted


def test_a_pod_without_a_node_goes_as_no_kubelet_holds_it():
    api = OneNode(NOT_READY)
    (event,) = deleted(api, pod("lost-0", node=None)).events
    assert "pod lost-0 has not ended, and it is on no node: deleted" in event.message
    assert [each["pod"] for each in api.deleted] == ["default/lost-0"]


def test_a_refusal_is_reported_with_the_way_out_and_the_next_pod_still_tried():
    api = OneNode(UNREACHABLE, ForbiddenError("cannot delete resource pods", code=403))
    found = deleted(api, pod("lost-0"), pod("lost-1"))
    assert [(each.object, each.reason) for each in found.failures] == [
        ("Pod lost-0", conditions.FORBIDDEN),
        ("Pod lost-1", conditions.FORBIDDEN),
    ]
    assert "deleteLostPods" in found.failures[0].message
    assert not found.events


def test_an_api_server_that_is_away_ends_the_reconcile():
    with pytest.raises(UnavailableError):
        deleted(OneNode(UNREACHABLE, UnavailableError("no answer")), pod("lost-0"))


def ending(name: str, **metadata: object) -> Body:
    found = pod(name)
    found["metadata"] |= {"deletionTimestamp": "2026-01-02T03:10:00Z", **metadata}
    return found


def nodes(api: OneNode, *bodies: Body, may_delete: bool = True) -> Mapping[str, str]:
    live = Live({"metadata": {"name": "chat", "namespace": "default", "uid": "u"}}, bodies)
    lost = LostPods(cast("ApiClient", api), may_delete, clock=lambda: 0.0)
    first, again = (asyncio.run(lost.nodes(live)) for _ in range(2))
    assert first == again
    return first


def test_nodes_of_pods_that_end_are_looked_at_once_in_a_while() -> None:
    api = OneNode(UNREACHABLE)
    assert nodes(api, ending("a"), ending("b"), pod("c")) == {"n1": TAINTED}
    assert api.looks == 1
    assert nodes(OneNode(NOT_READY), ending("a")) == {}
    assert nodes(OneNode(None), ending("a")) == {}  # Kubernetes deletes its pods itself


@pytest.mark.parametrize(
    ("body", "may_delete"),
    [
        (pod("a"), True),
        (ending("a", deletionGracePeriodSeconds=0), True),
        (ending("a"), False),
    ],
    ids=["it does not end", "it was deleted", "not allowed"],
)
def test_no_other_nodes_are_looked_at(body: Body, may_delete: bool) -> None:
    api = OneNode(UNREACHABLE)
    assert (nodes(api, body, may_delete=may_delete), api.looks) == ({}, 0)


def test_while_a_pod_ends_its_node_is_looked_at_again() -> None:
    assert deleted(OneNode(NOT_READY), ending("whole-0")).requeue_after_seconds == CHECK_SECONDS
