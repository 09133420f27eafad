"""Disaggregation in a record: refused pairs soon, figures rarely and only when they
have changed.
"""

import pytest

from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.peers.records import DisaggregationRecord, RefusedPeer
from pdcluster_worker.routing.prefill_choice import WINDOW_SECONDS, RemoteRatio
from pdcluster_worker.serving.disaggregation_stats import (
    FIGURES_SECONDS,
    MAX_REASON,
    MAX_REFUSED,
    DisaggregationStats,
)
from tests.worker.fake_clock import FakeClock


class Scene:
    """A worker's facts, to be changed by a test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.share = RemoteRatio()
        self.refused: dict[str, str] = {}
        self.rate = 0.0
        self.transport = "nixl", ""
        self.told = DisaggregationStats(
            lambda: self.transport, self.share, lambda: self.refused, lambda: self.rate, self.clock
        )

    def count(self, num_local: int, num_remote: int) -> None:
        for is_remote in [False] * num_local + [True] * num_remote:
            self.share.add(self.clock(), is_remote=is_remote)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_nothing_new_is_no_write(scene):
    assert not scene.told.poll()
    assert scene.told.stated == DisaggregationRecord("nixl")


def test_refused_peers_are_reported_at_the_next_look_and_taken_back(scene):
    scene.refused = {"p-1": "weights", "p-0": "dtype"}

    assert scene.told.poll()
    assert scene.told.stated.refused == [RefusedPeer("p-0", "dtype"), RefusedPeer("p-1", "weights")]
    assert not scene.told.poll()
    scene.refused = {}
    assert scene.told.poll()
    assert scene.told.stated == DisaggregationRecord("nixl")


def test_many_refused_peers_are_counted_and_the_first_few_named(scene):
    scene.refused = {f"p-{number:02}": "x" * 1000 for number in range(20)}
    scene.told.poll()

    assert scene.told.stated.num_refused == 20
    assert [peer.pod for peer in scene.told.stated.refused] == [
        f"p-{number:02}" for number in range(MAX_REFUSED)
    ]
    assert {len(peer.reason) for peer in scene.told.stated.refused} == {MAX_REASON}


def test_figures_are_reported_at_once_and_then_not_for_a_while(scene):
    scene.count(1, 3)
    scene.rate = 123_456_789.0
    assert scene.told.poll()
    stated = scene.told.stated
    assert (stated.long_prompts, stated.remote_ratio, stated.bytes_per_second) == (
        4,
        0.75,
        120_000_000,
    )

    scene.count(96, 0)
    scene.clock.advance(FIGURES_SECONDS - 1)
    assert not scene.told.poll()
    scene.clock.advance(1)
    assert scene.told.poll()
    assert (scene.told.stated.long_prompts, scene.told.stated.remote_ratio) == (100, 0.05)


def test_a_steady_load_writes_nothing(scene):
    """The same mix for an hour, of which the window's ends see a little more or less."""
    writes = 0
    for number in range(3600):
        scene.count(0 if number % 10 else 1, 1 if number % 10 else 0)
        scene.rate = 1e9 + (number % 7) * 1e7
        scene.clock.advance(1)
        if number > WINDOW_SECONDS:
            writes += scene.told.poll()

    assert writes == 1
    assert scene.told.stated.remote_ratio == 0.9


def test_a_quiet_worker_goes_on_saying_what_it_last_saw(scene):
    scene.count(0, 4)
    scene.told.poll()
    scene.clock.advance(100 * WINDOW_SECONDS)

    assert not scene.told.poll()
    assert scene.told.stated.remote_ratio == 1.0


async def test_the_rate_of_a_transfer_and_its_transport_are_metrics(worker):
    assert worker.transport == "tcp"
    worker.note_transfer(PrefillDone("r", 1000, 0.5, busy_seconds=0.5, transport="tcp"))
    # too short to measure: the last rate stays
    worker.note_transfer(PrefillDone("r", 1, 0.0, transport="tcp"))
    value = worker.metrics.registry.get_sample_value

    assert worker.sent_bytes_per_second == 2000
    assert value("pdcluster_kv_transfer_bytes_per_second", {"transport": "tcp"}) == 2000
    assert value("pdcluster_kv_transport_info", {"transport": "tcp"}) == 1


async def test_a_transfer_by_another_transport_than_configured_is_counted(worker):
    note = "not nixl: it does not reach the sender"
    worker.note_transfer(PrefillDone("r", 1, 0.1, transport="nixl"))
    worker.note_transfer(PrefillDone("r", 1, 0.1, transport="tcp", transport_note=note))
    value = worker.metrics.registry.get_sample_value

    assert (worker.transport, worker.transport_note) == ("tcp", note)
    assert value("pdcluster_kv_transport_fallbacks_total") == 1
    assert value("pdcluster_kv_transport_info", {"transport": "tcp"}) == 1
    assert value("pdcluster_kv_transport_info", {"transport": "nixl"}) is None


def test_a_fallback_is_reported_with_its_reason_and_when_it_ends(scene):
    scene.transport = "tcp", "x" * (MAX_REASON + 1)
    assert scene.told.poll()
    assert scene.told.stated.transport == "tcp"
    assert scene.told.stated.transport_note == "x" * (MAX_REASON - 3) + "..."
    scene.transport = "nixl", ""
    assert not scene.told.poll()  # many pairs may differ, and all workers read a record
    scene.clock.advance(FIGURES_SECONDS)
    assert scene.told.poll()
    assert scene.told.stated == DisaggregationRecord("nixl")
