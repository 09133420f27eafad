"""Actions of a reconcile that run at the same time, and effects of failures on the rest, against a
server under control.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest

from pdcluster_api.apiserver.errors import UnavailableError, UnsettledError
from pdcluster_operator.writes.actions import Action
from pdcluster_operator.writes.apply import MAX_AT_ONCE, MAX_DECISIONS, NO_VERSION, apply
from pdcluster_schema import conditions
from tests.apiserver import cluster_objects as objects
from tests.operator.differences import diff
from tests.operator.pdcluster_operator.writes.store import OWNER, Store


def making(*manifests: dict[str, Any]) -> list[Action]:
    return diff("owner-uid", manifests or objects.everything(OWNER), [])


def config_maps(number: int) -> list[dict[str, Any]]:
    return [
        objects.manifest("ConfigMap", "v1", f"chat-{position:02}", OWNER, data={})
        for position in range(number)
    ]


async def test_objects_that_do_not_need_each_other_are_written_together_and_stages_wait():
    store = Store(held={"ServiceAccount chat"})
    async with store.serve() as server:
        working = asyncio.create_task(apply(server.client, making()))
        async with asyncio.timeout(10):
            names = [await store.arrived.get() for _ in range(10)]
        assert not [name for name in names if name.startswith("StatefulSet")]
        assert store.arrived.empty()  # all of the first stage has come, and nothing of the next one
        store.release.set()
        assert await working == []
    kinds = [name.split()[0] for name in store.order]
    assert kinds[10:] == ["StatefulSet", "StatefulSet"]


async def test_no_more_than_the_bound_are_written_at_a_time():
    made = config_maps(3 * MAX_AT_ONCE)
    store = Store(
        held={f"ConfigMap {manifest['metadata']['name']}" for manifest in made[:MAX_AT_ONCE]}
    )
    async with store.serve() as server:
        working = asyncio.create_task(apply(server.client, making(*made)))
        async with asyncio.timeout(10):
            for _ in range(MAX_AT_ONCE):
                await store.arrived.get()
        store.release.set()
        assert await working == []
    assert (store.most_open, len(store.order)) == (MAX_AT_ONCE, len(made))


async def test_secrets_keep_their_order():
    authority = {
        **objects.secret(OWNER),
        "metadata": {**objects.secret(OWNER)["metadata"], "name": "chat-ca"},
    }
    store = Store(held={"Secret chat-ca"})
    async with store.serve() as server:
        working = asyncio.create_task(
            apply(server.client, making(objects.secret(OWNER), authority, *config_maps(3)))
        )
        async with asyncio.timeout(10):
            names = {await store.arrived.get() for _ in range(4)}
        assert "Secret chat-tls" not in names
        store.release.set()
        assert await working == []
    assert store.order[-1] == "Secret chat-tls"


async def test_a_refused_authority_holds_back_no_other_pair():
    names = ("chat-ca", "chat-pdc-ca", "chat-pdc-tls", "chat-tls")
    pairs = [
        {**objects.secret(OWNER), "metadata": {**objects.secret(OWNER)["metadata"], "name": name}}
        for name in names
    ]
    store = Store(refused={"Secret chat-pdc-ca": 403})
    async with store.serve() as server:
        failures = await apply(server.client, making(*pairs))
    assert [failure.object for failure in failures] == ["Secret chat-pdc-ca"]
    assert sorted(store.order) == ["Secret chat-ca", "Secret chat-pdc-ca", "Secret chat-tls"]
    assert store.order.index("Secret chat-ca") < store.order.index("Secret chat-tls")


async def test_each_refusal_is_reported_in_the_order_of_the_actions_and_stops_nothing():
    made = config_maps(4)
    store = Store(
        refused={"ConfigMap chat-00": 403, "ConfigMap chat-02": 422}, held={"ConfigMap chat-00"}
    )
    async with store.serve() as server:
        working = asyncio.create_task(
            apply(server.client, making(*made, objects.ingress_service(OWNER)))
        )
        async with asyncio.timeout(10):
            for _ in made:
                await store.arrived.get()
        store.release.set()
        failures = await working
    assert [failure.object for failure in failures] == ["ConfigMap chat-00", "ConfigMap chat-02"]
    assert "Service chat" in store.order


async def test_an_object_that_keeps_changing_is_reported_at_the_end_with_what_was_refused():
    store = Store(refused={"ConfigMap chat-00": 409, "ConfigMap chat-01": 422})
    async with store.serve() as server:
        with pytest.raises(
            UnsettledError, match="ConfigMap chat-00 was changed by others again and again"
        ) as caught:
            await apply(server.client, making(*config_maps(3), objects.ingress_service(OWNER)))
    assert [failure.object for failure in caught.value.failures] == ["ConfigMap chat-01"]
    assert Counter(store.order) == {
        "ConfigMap chat-00": MAX_DECISIONS,
        "ConfigMap chat-01": 1,
        "ConfigMap chat-02": 1,
        "Service chat": 1,
    }


async def test_a_server_that_cannot_be_used_gets_no_more_calls():
    made = config_maps(3 * MAX_AT_ONCE)
    store = Store(
        refused=dict.fromkeys(
            (f"ConfigMap {manifest['metadata']['name']}" for manifest in made), 503
        )
    )
    async with store.serve() as server:
        with pytest.raises(UnavailableError):
            await apply(server.client, making(*made))
    assert len(store.order) == MAX_AT_ONCE


async def test_a_fault_of_our_own_is_raised_and_leaves_nothing_running():
    def broken(kind: object, body: object) -> None:
        raise RuntimeError("broken")

    store = Store()
    async with store.serve() as server:
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await apply(server.client, making(), broken)
        assert {
            task for task in asyncio.all_tasks() if "_one_after_the_other" in repr(task)
        } == set()


async def test_making_is_an_apply_to_what_does_not_exist():
    store = Store()
    async with store.serve() as server:
        assert await apply(server.client, making(objects.config_map(OWNER))) == []
        [(method, path, body)] = server.seen
    assert (method, "force=false" in path, body["metadata"]["resourceVersion"]) == (
        "PATCH",
        True,
        NO_VERSION,
    )
    assert Counter(store.order) == {"ConfigMap chat-policy": 1}


async def test_a_service_that_gets_no_answer_stops_no_stateful_set_and_nothing_is_deleted():
    old = objects.manifest("ConfigMap", "v1", "chat-old", OWNER, data={})
    old["metadata"] |= {"uid": "uid-7", "resourceVersion": "3"}
    store = Store(refused={"Service chat-workers": 503})
    async with store.serve() as server:
        [failure] = await apply(server.client, diff("owner-uid", objects.everything(OWNER), [old]))
        methods = {method for method, _, _ in server.seen}
    kinds = Counter(name.split()[0] for name in store.order)
    assert (kinds["StatefulSet"], "DELETE" in methods) == (2, False)
    assert (failure.object, failure.reason) == ("Service chat-workers", conditions.APPLY_FAILED)
    assert failure.message.startswith("Service chat-workers is refused; it is tried again; if it")


async def test_a_refused_stateful_set_is_reported_with_a_service_that_gets_no_answer():
    refused = {"Service chat": 503, f"StatefulSet {objects.WORKLOAD}": 403}
    store = Store(refused=refused)
    async with store.serve() as server:
        failures = await apply(server.client, making())
    assert [failure.object for failure in failures] == [*refused]


@pytest.mark.parametrize("code", [409, 503])
async def test_later_stages_end_as_ever_after_a_service_that_gets_no_answer(code: int):
    store = Store(refused={"Service chat": 503, f"StatefulSet {objects.WORKLOAD}": code})
    expected = UnsettledError if code == 409 else UnavailableError
    async with store.serve() as server:
        with pytest.raises(expected) as caught:
            await apply(server.client, making())
    if isinstance(caught.value, UnsettledError):
        assert [failure.object for failure in caught.value.failures] == ["Service chat"]


async def test_after_a_service_that_gets_no_answer_no_more_services_are_begun():
    made = [
        objects.manifest("Service", "v1", f"chat-{position:02}", OWNER, spec={})
        for position in range(2 * MAX_AT_ONCE)
    ]
    refused = {f"Service {manifest['metadata']['name']}": 503 for manifest in made}
    store = Store(refused=refused)
    async with store.serve() as server:
        failures = await apply(server.client, making(*made, objects.stateful_set(OWNER)))
    kinds = Counter(name.split()[0] for name in store.order)
    assert kinds == {"Service": MAX_AT_ONCE, "StatefulSet": 1}
    assert [failure.object for failure in failures] == [*refused]
    waits = [failure for failure in failures if failure.message.startswith("waits for another")]
    assert len(waits) == len(made) - MAX_AT_ONCE
