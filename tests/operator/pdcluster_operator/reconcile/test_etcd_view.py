"""Reads of an etcd, the remembered answers, and the enqueuing of its cluster."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from pdcluster_api.apiserver.errors import UnavailableError
from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.discovery.commands import Registered, StoredRecord
from pdcluster_api.discovery.etcd import RegisteredWorker
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.plan.observed.state import (
    WorkerDevice,
    WorkerDisaggregation,
    WorkerRecords,
    WorkloadState,
)
from pdcluster_operator.reconcile import etcd_view as room
from pdcluster_operator.reconcile.etcd_requests import EtcdTarget
from pdcluster_operator.reconcile.etcd_view import (
    ACTIVE_POLL_SECONDS,
    EXTERNAL_POLL_SECONDS,
    IDLE_POLL_SECONDS,
    MAX_CONCURRENT_READS,
    MAX_FIRST_READS,
    RETRY,
    UNDRAIN_DELAY_SECONDS,
    UNREACHABLE_RETRY_SECONDS,
    EtcdView,
    ReadLimits,
)
from pdcluster_schema.load import parse
from tests.operator.pdcluster_api.plan.clusters import identity, workload
from tests.operator.pods import pod_states
from tests.schema.object_cases import minimal

KEY = Key("default", "chat")
TARGET = EtcdTarget(KEY, ("etcd:2379",))
GIVEN = replace(TARGET, is_external=True)
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OF = identity("r1")


def with_pods(*names: str) -> list[WorkloadState]:
    return [workload(OF, len(names), pods=pod_states(OF, names))]


class FakeEtcd:
    """Gives set answers, and counts."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.devices: dict[str, WorkerDevice] = {}
        self.said: dict[str, WorkerDisaggregation] = {}
        self.commands: dict[str, datetime | None] = {}
        self.roles: dict[str, str] = {}  # by command
        self.graces: dict[str, int] = {}
        self.num_written = 0
        self.changed: set[str] = set()  # pods of prefill workers that decode
        self.error: Exception | None = None
        self.refused: Exception | None = None
        self.is_full = False
        self.removed, self.targets = list[str](), list[EtcdTarget]()
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def num_reads(self) -> int:
        return len(self.targets)

    async def registered(self, target: EtcdTarget) -> Registered:
        self.targets.append(target)
        await self._answer()
        records = [
            RegisteredWorker(
                pod,
                "decode",
                "cpu",
                "e",
                state,
                {},
                device=self.devices.get(pod),
                disaggregation=self.said.get(pod),
                is_changed=pod in self.changed,
            )
            for pod, state in self.states.items()
        ]
        return Registered(
            {record.pod: StoredRecord(record.pod, 1, record) for record in records},
            dict(self.commands),
            self.is_full,
            dict(self.roles),
            dict(self.graces),
        )

    async def command(
        self,
        target: EtcdTarget,
        drain: Mapping[str, datetime],
        serve: Collection[str],
        roles: Mapping[str, str | None],
        graces: Mapping[str, int] | None = None,
    ) -> None:
        await self._answer()
        if self.refused is not None:
            raise self.refused
        self.commands = {
            **{pod: since for pod, since in self.commands.items() if pod not in serve},
            **drain,
        }
        self.num_written += 1
        self.graces.update({pod: each for pod, each in (graces or {}).items() if pod in drain})
        found = {**self.roles, **roles}
        self.roles = {pod: role for pod, role in found.items() if role is not None}

    async def remove(self, target: EtcdTarget, records: Iterable[StoredRecord]) -> list[str]:
        await self._answer()
        self.removed += [stored.record.pod for stored in records]
        return self.removed

    async def _answer(self) -> None:
        await self.answers.wait()
        if self.error is not None:
            raise self.error


class World:
    """etcd, a clock, and the keys that were enqueued."""

    def __init__(self) -> None:
        self.etcd, self.due, self.now, self.seconds = FakeEtcd(), list[Key](), START, 1000.0
        self.view = self.view_of()

    def view_of(self, key: Key = KEY, slots: ReadLimits | None = None) -> EtcdView:
        """The view of a cluster's etcd, as a new operator begins with it."""
        return EtcdView(
            self.etcd,
            lambda: self.due.append(key),
            slots or ReadLimits(),
            lambda: self.seconds,
            lambda: self.now,
        )

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.now += timedelta(seconds=seconds)

    async def last(self, *names: str) -> WorkerRecords | None:
        """Records that a reconcile gets; then the read that it began has ended."""
        found = self.view.last(TARGET, with_pods(*names))
        await looked(self.view)
        return found

    async def drain_only(self, *names: str) -> None:
        """Two passes, so that the commands of all others are taken back."""
        await self.view.command(TARGET, names)
        self.pass_by(UNDRAIN_DELAY_SECONDS)
        await self.view.command(TARGET, names)

    async def fresh(self, *names: str) -> WorkerRecords:
        """Records that a reconcile gets while a worker drains; then the read that it began has
        ended.
        """
        found = await self.view.fresh(TARGET, with_pods(*names))
        await looked(self.view)
        assert found is not None
        return found


async def looked(view: EtcdView) -> None:
    """Wait until its read, if there is one, has ended."""
    if view.reading is not None:
        await view.reading


async def until(predicate: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not predicate():
            await asyncio.sleep(0.001)


@pytest.fixture
async def world() -> World:
    return World()


async def test_the_device_of_workers_is_reported_and_enqueues_the_cluster(world: World):
    world.etcd.states = {"a": "ready", "b": "ready"}
    await world.last("a", "b")
    # another life of its engine; b is of an older version
    world.etcd.devices = {"a": WorkerDevice("cpu", "Xeon")}
    world.due.clear()
    world.pass_by(IDLE_POLL_SECONDS)
    await world.last("a", "b")
    found = await world.last("a", "b")

    assert world.due == [KEY]
    assert found is not None
    assert found.devices == {"a": WorkerDevice("cpu", "Xeon")}


async def test_an_etcd_that_fills_up_enqueues_the_cluster_and_so_does_its_room(world: World):
    await world.last()
    for is_full in (True, False):
        assert world.view.is_full(TARGET) != is_full
        world.etcd.is_full = is_full
        world.due.clear()
        world.pass_by(IDLE_POLL_SECONDS)
        await world.last()

        assert world.due == [KEY]
        assert world.view.is_full(TARGET) == is_full


async def test_the_first_pass_does_not_wait_and_is_made_again_when_the_answer_is_there(
    world: World,
):
    world.etcd.states = {"a": "ready"}
    assert await world.last("a") is None
    assert world.due == [KEY]
    assert await world.last("a") == WorkerRecords({"a": "ready"})


async def test_at_rest_etcd_is_read_seldom_and_no_key_is_enqueued_without_a_change(
    world: World,
):
    world.etcd.states = {"a": "ready"}
    for _ in range(5):
        await world.last("a")
    assert (world.etcd.num_reads, len(world.due)) == (1, 1)
    world.pass_by(IDLE_POLL_SECONDS)
    await world.last("a")
    assert (world.etcd.num_reads, len(world.due)) == (2, 1)
    world.pass_by(IDLE_POLL_SECONDS)
    world.etcd.states = {"a": "ready", "b": "ready"}
    await world.last("a")
    assert (world.etcd.num_reads, len(world.due)) == (3, 2)


async def test_what_is_followed_is_looked_at_between_passes_and_due_only_when_it_says_something_new(
    world: World,
):
    world.etcd.states, world.etcd.said = (
        {"a": "ready"},
        {"a": WorkerDisaggregation("tcp", long_prompts=100, remote_ratio=0.9)},
    )
    await world.last("a")
    world.view.follow(TARGET, is_tracked=True)

    async def look() -> tuple[int, int]:
        world.pass_by(IDLE_POLL_SECONDS)
        world.view.poll()
        await looked(world.view)
        return world.etcd.num_reads, len(world.due)

    assert await look() == (2, 1)
    world.etcd.said["a"] = WorkerDisaggregation("tcp", long_prompts=110, remote_ratio=0.91)
    assert await look() == (3, 1)
    world.etcd.said["a"] = WorkerDisaggregation("tcp", (("p", "dtype"),), 1)
    assert await look() == (4, 2)
    found = await world.last("a")
    assert found is not None
    assert found.disaggregation == world.etcd.said
    world.view.poll()  # it is not time yet
    assert world.etcd.num_reads == 4
    world.view.follow(TARGET, is_tracked=False)
    assert await look() == (4, 2)


async def test_an_etcd_that_is_not_up_is_not_read_and_one_that_failed_less_and_less_often(
    world: World,
):
    world.view.follow(TARGET, is_tracked=True)
    world.view.last(TARGET, with_pods("a"), is_up=False)
    world.view.poll()
    assert world.etcd.num_reads == 0

    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.last("a")
    assert world.etcd.num_reads == 1
    world.pass_by(ACTIVE_POLL_SECONDS - 1)
    world.view.poll()
    await asyncio.sleep(0)
    assert world.etcd.num_reads == 1
    world.pass_by(1)
    world.view.poll()
    await looked(world.view)
    assert world.etcd.num_reads == 2


async def test_what_is_odd_is_looked_at_sooner_and_how_long_it_lasts_is_known(world: World):
    world.etcd.states = {"ghost": "ready"}
    await world.last("orphan")
    found = await world.last("orphan")
    assert found is not None
    assert found.mismatched == {"ghost": 0.0, "orphan": 0.0}
    world.pass_by(ACTIVE_POLL_SECONDS)
    world.etcd.states = {"ghost": "ready", "orphan": "ready"}
    await world.last("orphan")
    found = await world.last("orphan")
    assert (world.etcd.num_reads, found and found.mismatched) == (2, {"ghost": ACTIVE_POLL_SECONDS})


async def test_what_came_since_the_last_look_is_not_odd_before_the_next_one(world: World):
    await world.fresh()
    world.pass_by(ACTIVE_POLL_SECONDS / 2)
    late = await world.last("a")
    world.pass_by(IDLE_POLL_SECONDS)
    assert late is not None
    assert late.mismatched == {}
    assert (await world.fresh("a")).mismatched == {"a": 0.0}
    world.pass_by(7)
    assert (await world.fresh("a", "b")).mismatched == {"a": 7.0, "b": 0.0}
    world.etcd.states = {"a": "ready", "b": "ready"}
    assert (await world.fresh("a", "b")).mismatched == {}


@pytest.mark.parametrize("is_asked", [True, False])
async def test_what_was_odd_before_etcd_went_away_starts_over(world: World, *, is_asked: bool):
    """It came back empty, went away again and came back: workers that serve have had no time to
    register.
    """
    world.etcd.states = {"ghost": "ready"}
    await world.fresh("a")
    world.pass_by(5)
    assert (await world.fresh("a")).mismatched == {"a": 5.0, "ghost": 5.0}
    if is_asked:
        world.etcd.error = EtcdUnreachableError("etcd is away")
        await world.fresh("a")
    else:
        found = world.view.last(TARGET, with_pods("a"), is_up=False)
        assert found is not None
        assert found.mismatched == {
            "a": 5.0,
            "ghost": 5.0,
        }  # so that nothing changes while etcd is silent
    world.pass_by(60)
    world.etcd.error = None
    await world.fresh("a")
    assert (await world.fresh("a")).mismatched == {"a": 0.0, "ghost": 0.0}
    world.pass_by(7)
    assert (await world.fresh("a")).mismatched == {"a": 7.0, "ghost": 7.0}


async def test_a_cluster_is_due_when_its_etcd_goes_away_behind_it(world: World):
    await world.fresh("a")
    world.etcd.error = EtcdUnreachableError("etcd is away")
    world.pass_by(IDLE_POLL_SECONDS)
    await world.last("a")
    assert world.due == [KEY]  # the reconcile gives its own requeue time


async def test_an_etcd_that_stays_away_is_read_ever_more_seldom_and_reported_once(
    world: World, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.last("a")
    pauses = []
    for _ in range(7):
        found = await world.last("a")
        assert found is not None
        assert found.again_seconds is not None
        pauses.append(found.again_seconds)
        world.pass_by(found.again_seconds)
        await world.last("a")
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, RETRY.most, RETRY.most]
    assert (world.etcd.num_reads, world.due) == (8, [KEY])
    assert caplog.text.count("etcd does not answer key=default/chat error=etcd is away") == 1
    world.etcd.error = None
    world.pass_by(RETRY.most)
    await world.last("a")
    assert (await world.last()) == WorkerRecords()
    assert world.due == [KEY, KEY]


@pytest.mark.parametrize("is_away", [False, True])
async def test_the_commands_of_a_cluster_that_is_gone_are_taken_back(
    world: World, caplog: pytest.LogCaptureFixture, *, is_away: bool
):
    caplog.set_level("INFO")
    await world.fresh("a", "b")
    await world.view.command(TARGET, {"a", "b"})
    world.etcd.error = EtcdUnreachableError("gone too") if is_away else None
    await world.view.end()
    await world.view.end()
    assert world.etcd.commands == ({"a": START, "b": START} if is_away else {})
    assert ("commands left key=default/chat pods=a,b error=gone too" in caplog.text) == is_away


async def test_an_etcd_that_is_known_to_be_down_is_not_read(world: World):
    assert world.view.last(TARGET, with_pods("a"), is_up=False) is None
    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.fresh("a")
    world.pass_by(RETRY.most)
    found = world.view.last(TARGET, with_pods("a"), is_up=False)
    assert found is not None
    assert (found.error, found.again_seconds, world.etcd.num_reads) == ("etcd is away", None, 1)
    await world.last("a")
    assert world.etcd.num_reads == 2


async def test_draining_workers_are_read_again_each_time(world: World):
    for state in ("ready", "draining", "drained"):
        world.etcd.states = {"a": state}
        assert (await world.fresh("a")).states == {"a": state}
    assert world.etcd.num_reads == 3


@pytest.mark.parametrize(
    "error", [EtcdUnreachableError("etcd is away"), UnavailableError("the API server is away")]
)
async def test_an_etcd_that_does_not_answer_is_waited_for_once_and_says_when_it_is_back(
    world: World, error: Exception
):
    await world.fresh("a")
    world.etcd.error = error
    for _ in range(3):
        found = await world.fresh("a")
        assert (found.error, found.states, found.mismatched) == (str(error), {}, {})
    assert world.etcd.num_reads == 2
    world.pass_by(UNREACHABLE_RETRY_SECONDS)
    assert (await world.fresh("a")).error == str(error)
    assert (world.etcd.num_reads, world.due) == (3, [])
    world.pass_by(UNREACHABLE_RETRY_SECONDS)
    world.etcd.error = None
    assert (await world.fresh("a")).error == str(error)  # as the pass found it
    assert world.due == [KEY]
    assert (await world.fresh("a")).error is None


async def test_an_etcd_that_takes_too_long_or_goes_wrong_is_an_error_too(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(room, "READ_TIMEOUT_SECONDS", 0.01)
    world.etcd.answers.clear()
    assert (await world.fresh("a")).error == GIVEN.silence
    world.etcd.answers.set()
    world.pass_by(UNREACHABLE_RETRY_SECONDS)
    world.etcd.error = KeyError("unforeseen")
    await world.fresh("a")
    assert (
        await world.fresh("a")
    ).error == "etcd at etcd:2379 cannot be asked (KeyError); the operator's log says more"
    assert "etcd not asked" in caplog.text


async def test_a_command_is_written_again_where_its_pod_has_less_time(world: World):
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    num_written = world.etcd.num_written
    await world.view.command(TARGET, {"a"}, graces={"a": 25})
    await world.view.command(TARGET, {"a"}, graces={"a": 25})
    await world.fresh("a")
    await world.view.command(TARGET, {"a"}, graces={"a": 25})
    assert (world.etcd.graces, world.etcd.num_written) == ({"a": 25}, num_written + 1)
    await world.view.command(TARGET, {"a"}, graces={"a": 2})
    assert (world.etcd.graces, world.etcd.commands) == ({"a": 2}, {"a": START})


async def test_commands_are_written_once_and_taken_back(world: World):
    await world.fresh("a", "b")
    await world.view.command(TARGET, {"a", "b"})
    assert world.etcd.commands == {"a": START, "b": START}
    world.pass_by(7)
    await world.drain_only("a")
    assert world.etcd.commands == {"a": START}
    found = await world.fresh("a", "b")
    assert (found.commands, found.requested) == ({"a"}, {"a": 7.0 + UNDRAIN_DELAY_SECONDS})
    await world.drain_only()
    assert ((await world.fresh("a")).requested, world.etcd.commands) == ({}, {})


async def test_the_next_operator_learns_since_when_from_the_command_itself(world: World):
    world.etcd.commands = {
        "a": START - timedelta(seconds=50),
        "b": None,
        "c": START + timedelta(hours=1),
    }
    assert (await world.fresh("a")).requested == {
        "a": 50.0,
        "c": 0.0,
    }  # a clock of another went ahead
    await world.drain_only("a")
    assert (await world.fresh("a")).requested == {"a": 50.0 + UNDRAIN_DELAY_SECONDS}


async def test_a_wall_clock_that_is_set_ends_no_drain(world: World):
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    world.now += timedelta(days=1)
    assert (await world.fresh("a")).requested == {"a": 0.0}
    assert world.etcd.commands == {"a": START}


async def test_time_counts_while_etcd_is_away_and_an_empty_one_gets_commands_again(world: World):
    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    world.pass_by(30)
    assert (await world.fresh("a")).requested == {"a": 30.0}
    world.etcd.error = None
    world.pass_by(UNREACHABLE_RETRY_SECONDS)
    await world.fresh("a")
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    assert world.etcd.commands == {"a": START}


async def test_a_command_that_etcd_does_not_take_is_written_at_the_next_look(world: World):
    await world.fresh("a")
    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.view.command(TARGET, {"a"})
    world.etcd.error = None
    assert (await world.fresh("a")).error == "etcd is away"
    world.pass_by(UNREACHABLE_RETRY_SECONDS)
    await world.fresh("a")
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    assert world.etcd.commands == {"a": START}


async def test_a_command_is_taken_back_a_moment_later_for_its_pod_may_be_about_to_end(world: World):
    await world.fresh("a", "b")
    await world.view.command(TARGET, {"a", "b"})
    for seconds, drain, told in (
        (0.0, {"b"}, {"a", "b"}),
        (0.9, {"b"}, {"a", "b"}),
        (0.2, {"a", "b"}, {"a", "b"}),
    ):
        world.pass_by(seconds)
        await world.view.command(TARGET, drain)
        assert world.etcd.commands.keys() == told
    # it drained again meanwhile: this counts again
    for seconds, told in ((5.0, {"a", "b"}), (UNDRAIN_DELAY_SECONDS, {"b"})):
        world.pass_by(seconds)
        await world.view.command(TARGET, {"b"})
        assert world.etcd.commands.keys() == told


async def test_a_look_that_began_before_a_command_does_not_hide_it(world: World):
    world.etcd.states, world.etcd.commands = {"a": "drained"}, {"a": START}
    await world.fresh("a")
    world.pass_by(IDLE_POLL_SECONDS)
    old, world.etcd.answers = world.etcd.answers, asyncio.Event()
    before = dict(world.etcd.commands)
    world.view.last(TARGET, with_pods("a"))
    await asyncio.sleep(0)
    slow, world.etcd.answers = world.etcd.answers, old
    await world.drain_only()
    world.etcd.commands = before  # what the slow answer was made of
    slow.set()
    found = await world.last("a")
    assert found is not None
    assert found.commands == frozenset()


async def test_only_records_that_were_read_are_removed_and_an_error_only_logged(
    world: World, caplog: pytest.LogCaptureFixture
):
    await world.view.remove(TARGET, ["ghost"])  # nothing is known yet
    world.etcd.states = {"ghost": "ready", "a": "ready"}
    await world.fresh("a")
    await world.view.remove(TARGET, ["ghost", "stranger"])
    assert world.etcd.removed == ["ghost"]
    await world.fresh("a")
    world.etcd.error = UnavailableError("the API server is away")
    await world.view.remove(TARGET, ["ghost"])
    assert world.etcd.removed == ["ghost"]
    assert "records not removed" in caplog.text


async def test_a_cluster_that_is_gone_or_has_another_etcd_is_forgotten(world: World):
    world.etcd.answers.clear()
    assert world.view.last(TARGET, with_pods("a")) is None
    task = world.view.reading
    assert task is not None
    await world.view.end()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    world.etcd.answers.set()
    await world.fresh("a")
    await world.view.command(TARGET, {"a"})
    other = await world.view.fresh(EtcdTarget(KEY, ("other:2379",)), with_pods("a"))
    assert other is not None
    assert other.requested == {"a": 0.0}  # only what that etcd itself says
    assert world.due == []


async def test_an_operator_that_starts_looks_at_a_few_clusters_at_a_time(world: World):
    world.etcd.answers.clear()
    keys = [Key("default", f"chat-{number}") for number in range(3 * MAX_CONCURRENT_READS)]
    slots = ReadLimits()
    views = [world.view_of(key, slots) for key in keys]
    for view in views:
        view.last(TARGET, ())
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.etcd.num_reads == MAX_CONCURRENT_READS
    world.etcd.answers.set()
    for view in views:
        await looked(view)
    assert sorted(world.due) == sorted(keys)


def test_the_etcd_that_is_run_for_a_cluster_is_reached_at_its_service():
    document = minimal()
    key = Key("default", document["metadata"]["name"])
    assert EtcdTarget.of(parse(document)) == EtcdTarget(key, (f"{key.name}-etcd.default.svc:2379",))
    document["spec"]["discovery"] = {"etcd": {"endpoints": ["etcd:2379"], "tlsSecret": "etcd"}}
    assert EtcdTarget.of(parse(document)) == EtcdTarget(
        key, ("etcd:2379",), "etcd", is_external=True
    )


async def test_the_first_answer_of_a_given_etcd_is_waited_for_and_then_remembered(world: World):
    world.etcd.error = EtcdUnreachableError("refused")
    assert [await world.view.error(GIVEN) for _ in range(2)] == ["refused"] * 2
    assert (world.etcd.num_reads, world.due) == (1, [KEY])
    found = world.view.last(GIVEN, with_pods("a"), is_up=False)
    assert found is not None
    # it is polled, and a change enqueues
    assert (found.error, found.again_seconds) == ("refused", None)


async def test_a_given_etcd_is_as_the_last_read_of_its_records_found_it(world: World):
    world.etcd.states = {"a": "ready"}
    assert await world.view.error(GIVEN) is None
    assert world.view.last(GIVEN, with_pods("a")) == WorkerRecords({"a": "ready"})
    world.etcd.error = EtcdUnreachableError("etcd is away")
    await world.view.fresh(GIVEN, with_pods("a"))
    assert await world.view.error(GIVEN) == "etcd is away"
    assert world.etcd.num_reads == 2


async def test_a_given_etcd_that_refuses_commands_answers_all_the_same(world: World):
    await world.view.error(GIVEN)
    world.etcd.refused = EtcdUnreachableError("mvcc: database space exceeded")
    await world.view.command(GIVEN, {"a"})
    assert await world.view.error(GIVEN) is None
    found = world.view.last(GIVEN, with_pods("a"))
    assert found is not None
    assert found.error == "mvcc: database space exceeded"  # which holds what waits for it
    world.etcd.error = EtcdUnreachableError("mvcc: database space exceeded")
    world.pass_by(EXTERNAL_POLL_SECONDS)
    world.view.poll()
    await looked(world.view)
    assert await world.view.error(GIVEN) == "mvcc: database space exceeded"
    assert world.due == [KEY, KEY]


async def test_a_read_that_is_cut_short_for_a_reconcile_leaves_the_judgement_to_a_whole_one(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "READ_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(room, "FIRST_READ_TIMEOUT_SECONDS", 0.01)
    world.etcd.answers.clear()
    late = GIVEN.silence
    assert await world.view.error(GIVEN) == late
    assert (await world.view.fresh(GIVEN, ())) is not None
    assert await world.view.error(GIVEN) == late  # no read has answered so far
    world.etcd.answers.set()
    await looked(world.view)
    assert await world.view.error(GIVEN) is None
    world.etcd.answers.clear()
    found = await world.view.fresh(GIVEN, ())
    assert found is not None
    assert found.error == late
    assert await world.view.error(GIVEN) is None


async def test_slow_etcds_do_not_add_up_and_each_answers_when_it_can(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "FIRST_READ_TIMEOUT_SECONDS", 1000.0)
    slots, num_slow = ReadLimits(), MAX_CONCURRENT_READS + 1
    world.etcd.answers.clear()
    slow = [world.view_of(Key("default", f"slow-{number}"), slots) for number in range(num_slow)]
    waiting = [asyncio.create_task(view.error(GIVEN)) for view in slow]
    await until(lambda: world.etcd.num_reads == num_slow)
    quick = world.view_of(Key("default", "quick"), slots)
    async with asyncio.timeout(10):  # of which nothing is used: as many as may wait do so
        assert await quick.error(GIVEN) == GIVEN.silence
    await until(lambda: world.etcd.num_reads == num_slow + 1)  # it is asked all the same
    assert sum(not task.done() for task in waiting) == MAX_FIRST_READS
    world.etcd.answers.set()
    await until(lambda: Key("default", "quick") in world.due)
    assert await quick.error(GIVEN) is None
    await asyncio.gather(*waiting)


async def test_a_given_etcd_is_read_now_and_then_and_its_cluster_is_enqueued_when_that_changes(
    world: World,
):
    async def poll() -> tuple[int, int]:
        world.pass_by(EXTERNAL_POLL_SECONDS)
        world.view.poll()
        await looked(world.view)
        return world.etcd.num_reads, len(world.due)

    await world.view.error(GIVEN)
    assert [await poll(), await poll()] == [(2, 1), (3, 1)]
    world.etcd.error = EtcdUnreachableError("gone")
    assert await poll() == (4, 2)
    assert await world.view.error(GIVEN) == "gone"
    assert [await poll(), await poll()] == [(5, 2), (6, 2)]  # as often as one that answers
    world.etcd.error = EtcdUnreachableError("refused")
    assert await poll() == (7, 3)
    world.etcd.error = None
    assert await poll() == (8, 4)
    assert await world.view.error(GIVEN) is None


async def test_a_read_that_is_under_way_is_not_begun_twice(world: World):
    await world.view.error(GIVEN)
    world.etcd.answers.clear()
    for _ in range(3):
        world.pass_by(EXTERNAL_POLL_SECONDS)
        world.view.poll()
        await asyncio.sleep(0)
    assert world.etcd.num_reads == 2
    world.view.stop()


async def test_a_slow_read_that_fails_after_a_later_one_has_answered_says_nothing(world: World):
    await world.view.error(GIVEN)
    old, world.etcd.answers = world.etcd.answers, asyncio.Event()
    world.pass_by(EXTERNAL_POLL_SECONDS)
    world.view.poll()
    await asyncio.sleep(0)
    slow, world.etcd.answers = world.etcd.answers, old
    await world.view.fresh(GIVEN, ())
    world.etcd.error = EtcdUnreachableError("it was away")
    slow.set()
    await looked(world.view)
    assert await world.view.error(GIVEN) is None


async def test_another_etcd_in_the_place_of_the_first_is_read_and_the_first_no_more(world: World):
    await world.view.error(GIVEN)
    other = replace(GIVEN, endpoints=("other:2379",))
    world.etcd.error = EtcdUnreachableError("refused")
    assert await world.view.error(other) == "refused"
    assert world.etcd.targets == [GIVEN, other]


async def test_role_commands_are_written_once_and_taken_back_at_once(world: World):
    world.etcd.states = {"a": "ready", "b": "ready"}
    await world.last("a", "b")
    await world.view.command(TARGET, (), {"a": "decode"})
    assert (world.etcd.roles, world.etcd.commands) == ({"a": "decode"}, {})
    world.etcd.refused = EtcdUnreachableError("etcd does not answer", "refused")
    await world.view.command(TARGET, (), {"a": "decode"})  # nothing is to be written
    world.etcd.refused = None
    await world.view.command(TARGET, (), {"b": "decode"})
    assert world.etcd.roles == {"b": "decode"}
    await world.view.command(TARGET, ())
    assert world.etcd.roles == {}


async def test_role_that_a_worker_has_taken_enqueues_the_cluster(world: World):
    world.etcd.states, world.etcd.roles = {"a": "ready"}, {"a": "decode"}
    await world.last("a")
    world.etcd.changed = {"a"}
    world.due.clear()
    found = await world.fresh("a")
    assert (found.roles, found.serves) == ({"a": "decode"}, {"a": "decode"})
    world.etcd.changed = set()
    world.pass_by(IDLE_POLL_SECONDS)
    await world.last("a")
    assert world.due == [KEY]


async def test_etcd_that_comes_back_empty_gets_role_commands_again(world: World):
    world.etcd.states = {"a": "ready"}
    await world.last("a")
    await world.view.command(TARGET, (), {"a": "decode"})
    world.etcd.roles = {}
    world.pass_by(IDLE_POLL_SECONDS)
    await world.last("a")
    await world.view.command(TARGET, (), {"a": "decode"})
    assert world.etcd.roles == {"a": "decode"}


async def test_role_commands_of_a_cluster_that_is_gone_are_taken_back(world: World):
    world.etcd.states, world.etcd.roles = {"a": "ready"}, {"a": "decode"}
    await world.last("a")
    await world.view.end()
    assert world.etcd.roles == {}
