"""A worker's record and its membership on a real etcd that goes, comes back, and comes back empty.

Probes answer as each test says; real ones are tested in test_directory.py.
"""

import asyncio
import base64
import json
from collections.abc import Callable
from math import inf
from typing import Any

import httpx
import msgspec
import pytest

from pdcluster_worker.peers.etcd import Etcd
from pdcluster_worker.peers.records import WorkerRecord

Eventually = Callable[..., Any]


async def test_workers_find_each_other_and_see_state_changes(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})
    assert a.discovery.registered_once
    assert a.discovery.problem is None

    a.discovery.update(msgspec.structs.replace(a.own, state="draining"))

    await eventually(lambda: b.members["a"].state == "draining")


async def test_closed_worker_leaves_at_once_when_it_does_not_answer(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a", lease_seconds=60), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})
    b.dead.add("a")

    await a.discovery.close()  # revokes: with a lease of 60 s nothing else could remove it in time

    await eventually(lambda: b.pods == {"b"})


async def test_last_word_of_a_worker_is_reported_before_its_end(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    """Both may come in one answer of etcd, and a drained worker is treated otherwise than a lost
    one.
    """
    a, b = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})
    async with Etcd(shared_etcd.endpoint, 5.0, None) as etcd:
        before = await etcd.read(a.own_key)
        a.discovery.update(msgspec.structs.replace(a.own, state="drained"))
        await a.discovery.close()
        await eventually(lambda: b.pods == {"b"})
        b.told.clear()
        # what has been comes in one answer
        again = asyncio.create_task(b.discovery._watch_workers(etcd, before.revision + 1))
        await eventually(lambda: b.told and b.pods == {"b"})
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    assert [{pod: record.state for pod, record in members.items()} for members in b.told] == [
        {"a": "drained", "b": "ready"},
        {"b": "ready"},
    ]


async def test_deleted_member_that_answers_is_kept_until_it_does_not(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})

    await a.discovery.close()
    await eventually(lambda: b.probed)
    assert b.pods == {"a", "b"}

    b.dead.add("a")
    await eventually(lambda: b.pods == {"b"})


async def test_worker_that_stopped_renewing_leaves_when_its_lease_expires(
    shared_etcd: Any, watcher: Any, record: Any, eventually: Eventually
) -> None:
    b = watcher(shared_etcd.endpoint, "b")
    b.dead.add("a")
    await eventually(lambda: b.pods == {"b"})

    write_leased(shared_etcd, b, record("a"))

    await eventually(lambda: b.pods == {"a", "b"})
    await eventually(lambda: b.pods == {"b"})


async def test_drain_command_is_seen_and_its_absence_too(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, other = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "a0")
    await eventually(lambda: a.discovery.registered_once and other.discovery.registered_once)

    shared_etcd.ctl("put", a.command, "drain")
    await eventually(lambda: a.drains == [True])
    shared_etcd.ctl("del", a.command)
    await eventually(lambda: a.drains == [True, False])

    assert other.drains == []


async def test_role_command_is_seen_as_it_changes_and_at_the_start(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, other = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "a0")
    await eventually(lambda: a.discovery.registered_once and other.discovery.registered_once)

    shared_etcd.ctl("put", a.role, "decode")
    await eventually(lambda: a.roles == ["decode"])
    again = watcher(shared_etcd.endpoint, "a")
    await eventually(lambda: again.roles == ["decode"])
    shared_etcd.ctl("del", a.role)
    await eventually(lambda: a.roles == again.roles == ["decode", None])

    assert other.roles == []


async def test_grace_period_of_a_drain_command_is_seen_and_may_change(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher(shared_etcd.endpoint, "a")
    await eventually(lambda: a.discovery.registered_once)
    shared_etcd.ctl("put", a.command, "drain")
    await eventually(lambda: a.graces == [inf])
    shared_etcd.ctl("put", a.command, '{"graceSeconds": 25}')
    await eventually(lambda: a.graces == [inf, 25])
    shared_etcd.ctl("put", a.command, '{"graceSeconds": "no number"}')
    await eventually(lambda: a.graces == [inf, 25, inf])
    assert a.drains == [True, True, True]


async def test_drain_command_that_was_there_first_is_seen(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    first = watcher(shared_etcd.endpoint, "a")
    await first.discovery.close()
    shared_etcd.ctl("put", first.command, "drain")

    again = watcher(shared_etcd.endpoint, "a")

    await eventually(lambda: again.drains == [True])


async def test_worker_that_starts_under_a_command_is_never_seen_as_ready(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    first = watcher(shared_etcd.endpoint, "a")
    await first.discovery.close()
    shared_etcd.ctl("put", first.command, "drain")

    again = watcher(shared_etcd.endpoint, "a", obeys=True)
    await eventually(lambda: again.discovery.registered_once)

    stored = json.loads(shared_etcd.ctl("get", again.own_key, "-w", "json"))["kvs"][0]
    assert (json.loads(base64.b64decode(stored["value"]))["state"], stored["version"]) == (
        "draining",
        1,
    )


async def test_last_of_many_quick_changes_is_what_etcd_holds(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher(shared_etcd.endpoint, "a")
    await eventually(lambda: a.pods == {"a"})
    for last in ("drained", "ready"):
        for turn in range(50):
            a.discovery.update(
                msgspec.structs.replace(a.own, state=("draining", "ready", "drained")[turn % 3])
            )
            await asyncio.sleep(0.001 * (turn % 4))  # some changes meet a write that is under way
        a.discovery.update(msgspec.structs.replace(a.own, state=last))
        await eventually(
            lambda last=last: (
                stored_record(shared_etcd, a).state == last and a.members["a"].state == last
            )
        )
    assert a.discovery.problem is None


async def test_late_write_of_an_older_state_does_not_stay(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    """As of a call that timed out here and was carried out there."""
    a = watcher(shared_etcd.endpoint, "a")
    await eventually(lambda: a.pods == {"a"})

    write_leased(shared_etcd, a, msgspec.structs.replace(a.own, state="drained"), seconds=60)

    await eventually(lambda: stored_record(shared_etcd, a).state == a.members["a"].state == "ready")


async def test_record_of_another_engine_of_the_pod_is_not_fought_over(
    shared_etcd: Any, watcher: Any, record: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})

    write_leased(shared_etcd, a, record("a", engine_id="next"), seconds=60)
    await eventually(lambda: a.members["a"].engine_id == "next")
    b.discovery.update(msgspec.structs.replace(b.own, state="draining"))
    # what a could have written would be there by now
    await eventually(lambda: a.members["b"].state == "draining")

    assert stored_record(shared_etcd, a).engine_id == "next"


async def test_worker_of_a_node_that_comes_back_leaves_the_pod_to_its_successor(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    """Its pod was given up meanwhile, and another one of the name serves: its node ends it."""
    endpoint = shared_etcd.endpoint
    lost = watcher(endpoint, "a", engine_id="lost", lease_seconds=60)
    b = watcher(endpoint, "b", lease_seconds=60)
    await eventually(lambda: b.pods == {"a", "b"})
    watcher(endpoint, "a", engine_id="next", lease_seconds=60)
    await eventually(lambda: b.members["a"].engine_id == "next")

    lost.discovery.update(msgspec.structs.replace(lost.own, state="draining"))  # by SIGTERM
    await eventually(lambda: b.members["a"].engine_id == "lost")
    await lost.discovery.close()

    await eventually(lambda: b.members["a"].engine_id == "next")


async def test_closed_worker_says_its_last_word_first(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a", lease_seconds=60), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})

    a.discovery.update(msgspec.structs.replace(a.own, state="drained"))
    await a.discovery.close()

    await eventually(lambda: b.pods == {"b"})
    assert b.probed == []  # the record of a drained worker is believed


async def test_record_that_was_deleted_is_written_again(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a, b = watcher(shared_etcd.endpoint, "a"), watcher(shared_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})

    shared_etcd.ctl("del", a.own_key)

    await eventually(lambda: a.own_key in shared_etcd.ctl("get", a.own_key))
    assert b.pods == {"a", "b"}


async def test_record_that_is_not_ours_is_ignored(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher(shared_etcd.endpoint, "a")
    await eventually(lambda: a.pods == {"a"})

    shared_etcd.ctl("put", f"{a.own_key}-bad", "no json")
    b = watcher(shared_etcd.endpoint, "b")

    await eventually(lambda: a.pods == b.pods == {"a", "b"})


async def test_unreachable_etcd_is_a_stated_problem_until_it_comes_up(
    stopped_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher(stopped_etcd.endpoint, "a")
    await eventually(lambda: stopped_etcd.endpoint in a.discovery.problem)
    assert not a.discovery.registered_once

    stopped_etcd.start()

    await eventually(
        lambda: a.discovery.registered_once and a.discovery.problem is None and a.pods == {"a"}
    )


async def test_worker_counts_as_registered_when_others_can_see_its_record(
    shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    """A client that looks into etcd, as pdctl does, sends its first request at that moment."""
    a = watcher(shared_etcd.endpoint, "a")
    put, seen = a.discovery._put_record, []

    async def poll(*given: Any) -> None:
        seen.append(a.discovery.registered_once)
        await put(*given)

    a.discovery._put_record = poll
    await eventually(lambda: a.discovery.registered_once and a.pods == {"a"})

    assert seen == [True]


async def test_second_endpoint_serves_when_the_first_does_not(
    stopped_etcd: Any, shared_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher([stopped_etcd.endpoint, shared_etcd.endpoint], "a")

    await eventually(lambda: a.pods == {"a"})


async def test_close_without_etcd_ends(
    stopped_etcd: Any, watcher: Any, eventually: Eventually
) -> None:
    a = watcher(stopped_etcd.endpoint, "a")
    await eventually(lambda: stopped_etcd.endpoint in a.discovery.problem)

    await asyncio.wait_for(a.discovery.close(), 20)


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_outage_keeps_members_and_heals_by_itself(
    own_etcd: Any, watcher: Any, eventually: Eventually, empty: bool
) -> None:
    a, b = watcher(own_etcd.endpoint, "a"), watcher(own_etcd.endpoint, "b")
    await eventually(lambda: a.pods == b.pods == {"a", "b"})

    own_etcd.kill()
    await eventually(lambda: a.discovery.problem and b.discovery.problem)
    # The outage outlasts the lease of 2 s; meanwhile a record changes.
    a.discovery.update(msgspec.structs.replace(a.own, state="draining"))
    await asyncio.sleep(4)
    assert a.pods == b.pods == {"a", "b"}
    assert a.discovery.registered_once

    own_etcd.start(empty=empty)

    await eventually(lambda: a.discovery.problem is None and b.discovery.problem is None)
    await eventually(lambda: b.members["a"].state == "draining")
    assert a.pods == b.pods == {"a", "b"}
    c = watcher(own_etcd.endpoint, "c")
    await eventually(lambda: a.pods == b.pods == c.pods == {"a", "b", "c"})


async def test_members_that_died_during_an_outage_leave_after_it(
    own_etcd: Any, watcher: Any, record: Any, eventually: Eventually
) -> None:
    a = watcher(own_etcd.endpoint, "a")
    write_leased(own_etcd, a, record("b"), seconds=60)
    write_leased(own_etcd, a, record("c"), seconds=60)
    await eventually(lambda: a.pods == {"a", "b", "c"})
    own_etcd.kill()
    await eventually(lambda: a.discovery.problem)
    a.dead.add("b")
    assert a.pods == {"a", "b", "c"}

    own_etcd.start(empty=True)

    # b does not answer: gone.  c does, though this etcd has no record of it: kept.
    await eventually(lambda: a.pods == {"a", "c"})
    a.dead.add("c")
    await eventually(lambda: a.pods == {"a"})


def stored_record(etcd: Any, of: Any) -> WorkerRecord:
    """Record in etcd now."""
    return msgspec.json.decode(etcd.ctl("get", of.own_key, "--print-value-only"), type=WorkerRecord)


def write_leased(etcd: Any, beside: Any, record: Any, *, seconds: int = 1) -> None:
    """Write a record under a lease without renewals, as a worker that has died since."""
    key = beside.own_key.removesuffix(beside.own.pod) + record.pod
    # By etcd's JSON gateway: the start of two etcdctl can take longer than a short lease.
    with httpx.Client(base_url=f"http://{etcd.endpoint}/v3") as gateway:
        lease = gateway.post("/lease/grant", json={"TTL": seconds}).json()["ID"]
        put = {"key": _base64(key.encode()), "value": _base64(msgspec.json.encode(record))}
        gateway.post("/kv/put", json=put | {"lease": lease}).raise_for_status()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
