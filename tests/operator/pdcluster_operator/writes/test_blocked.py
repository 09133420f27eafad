"""StatefulSets wait while what their pods would use is foreign; the others go on."""

from typing import Any

import pytest
from aiohttp import web

from pdcluster_api.apiserver.errors import ForbiddenError, NameTakenError
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.writes.actions import (
    NEEDED,
    Action,
    MissingDependency,
    Verb,
    blocked_failure,
    is_missing_dependency,
)
from pdcluster_operator.writes.apply import apply
from pdcluster_schema.conditions import FORBIDDEN, NAME_TAKEN
from tests.apiserver import cluster_objects as objects
from tests.operator.differences import diff
from tests.operator.pdcluster_operator.writes.store import OWNER, Store

TAKEN = WriteFailure("the object", NAME_TAKEN, "exists and does not belong to this PDCluster")
MOUNTED: dict[str, Any] = {"name": "tls", "secret": {"secretName": "chat-tls"}}
PROJECTED: dict[str, Any] = {
    "name": "tls",
    "projected": {"sources": [{"secret": {"name": "chat-tls"}}]},
}


def creation(manifest: dict[str, Any]) -> Action:
    (action,) = diff("owner-uid", [manifest], [])
    return action


def workload(
    *volumes: dict[str, Any], service_account: str = "default", cluster: str = objects.NAME
) -> Action:
    made = objects.stateful_set(OWNER)
    pod = made["spec"]["template"]
    pod["spec"] |= {
        "serviceAccountName": service_account,
        "volumes": [*pod["spec"]["volumes"], *volumes],
    }
    pod["metadata"]["labels"] = {"pdcluster.io/cluster": cluster}
    return creation(made)


@pytest.mark.parametrize(
    ("taken", "user", "stranger"),
    [
        (
            objects.service_account(OWNER),
            workload(service_account="chat"),
            workload(service_account="other"),
        ),
        (objects.secret(OWNER), workload(MOUNTED), workload()),
        (objects.secret(OWNER), workload(PROJECTED), workload()),
        (objects.network_policy(OWNER), workload(), workload(cluster="other")),
    ],
    ids=["ServiceAccount", "Secret", "projected Secret", "NetworkPolicy"],
)
def test_only_what_would_use_it_waits(
    taken: dict[str, Any], user: Action, stranger: Action
) -> None:
    lacking = [MissingDependency(creation(taken), TAKEN)]
    waits = WriteFailure(str(user), NAME_TAKEN, "waits for the object", waits=True)
    assert blocked_failure(user, lacking) == waits
    assert blocked_failure(stranger, lacking) is None
    assert blocked_failure(creation(objects.config_map(OWNER)), lacking) is None


def test_one_that_goes_does_not_wait() -> None:
    live = {**objects.stateful_set(OWNER)}
    live["metadata"] = {**live["metadata"], "uid": "of-it"}
    (deletion,) = diff("owner-uid", [], [live])
    assert (
        blocked_failure(
            deletion, [MissingDependency(creation(objects.network_policy(OWNER)), TAKEN)]
        )
        is None
    )


def test_what_is_ours_and_could_not_be_changed_is_there() -> None:
    action = creation(objects.service_account(OWNER))
    there = Action(Verb.APPLY, action.kind, action.namespace, action.name, action.desired, "uid")
    assert is_missing_dependency(action, ForbiddenError("no right"))
    assert not is_missing_dependency(there, ForbiddenError("no right"))
    assert is_missing_dependency(there, NameTakenError("taken"))
    assert not is_missing_dependency(creation(objects.config_map(OWNER)), NameTakenError("taken"))


async def test_a_secret_of_a_refused_authority_holds_its_user_back_and_nothing_is_deleted() -> None:
    authority = {
        **objects.secret(OWNER),
        "metadata": {**objects.secret(OWNER)["metadata"], "name": "chat-ca"},
    }
    old = {
        **objects.config_map(OWNER),
        "metadata": {**objects.config_map(OWNER)["metadata"], "name": "old", "uid": "of-old"},
    }
    user = dict(workload(MOUNTED).desired)
    actions = diff(
        "owner-uid", [authority, objects.secret(OWNER), user, objects.ingress_service(OWNER)], [old]
    )
    store = Store(refused={"Secret chat-ca": 403})
    async with store.serve() as server:
        first, waits = await apply(server.client, actions)
    assert (first.object, waits.object, waits.reason) == (
        "Secret chat-ca",
        f"StatefulSet {objects.WORKLOAD}",
        first.reason,
    )
    assert first.message.endswith(
        "until then no StatefulSet that would use it is made or changed, and nothing is deleted"
    )
    assert set(store.order) == {"Secret chat-ca", "Service chat"}
    assert first.reason != FORBIDDEN  # an admission plugin's refusal, and no right that is missing


async def test_users_of_two_refused_authorities_each_wait_for_their_own() -> None:
    names = ("chat-ca", "chat-tls", "chat-pdc-ca", "chat-pdc-tls")
    pairs = [
        {**objects.secret(OWNER), "metadata": {**objects.secret(OWNER)["metadata"], "name": name}}
        for name in names
    ]
    user = dict(workload({"name": "tls", "secret": {"secretName": "chat-tls"}}).desired)
    newer = dict(workload({"name": "tls", "secret": {"secretName": "chat-pdc-tls"}}).desired)
    newer["metadata"] = {**newer["metadata"], "name": "chat-newer"}
    store = Store(refused={"Secret chat-ca": 403, "Secret chat-pdc-ca": 403})
    async with store.serve() as server:
        failures = await apply(server.client, diff("owner-uid", [*pairs, user, newer], []))
    waits = {
        failure.object: failure.message
        for failure in failures
        if failure.object.startswith("StatefulSet")
    }
    assert waits == {
        f"StatefulSet {objects.WORKLOAD}": "waits for Secret chat-ca",
        "StatefulSet chat-newer": "waits for Secret chat-pdc-ca",
    }


def test_every_kind_that_pods_need_is_made_before_them() -> None:
    assert {kind.name for kind in NEEDED} == {"ServiceAccount", "Secret", "NetworkPolicy"}


class Deleting(Store):
    """One that has something to delete."""

    async def answer(self, request: web.Request) -> web.Response:
        return (
            web.json_response({"kind": "Status"})
            if request.method == "DELETE"
            else await super().answer(request)
        )


async def test_a_disruption_budget_goes_though_nothing_else_is_deleted() -> None:
    """Beside the one that comes it would keep its pods from any eviction."""
    old = [
        {**body, "metadata": {**body["metadata"], "uid": "of-it"}}
        for body in (objects.disruption_budget(OWNER), objects.config_map(OWNER))
    ]
    store = Deleting(refused={"NetworkPolicy chat": 403})
    async with store.serve() as server:
        failures = await apply(
            server.client, diff("owner-uid", [objects.network_policy(OWNER)], old)
        )
        deleted = [path for method, path, _ in server.seen if method == "DELETE"]
    assert [failure.object for failure in failures] == ["NetworkPolicy chat"]
    assert len(deleted) == 1
    assert "poddisruptionbudgets/chat-decode-cpu" in deleted[0]
