"""Engine reports to Prometheus: differences, gauges, the busy ratio over a window."""

import msgspec
import pytest

from pdcluster_worker.messages.engine import EngineStats, TierStats
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.serving.engines.metrics import EngineMetrics
from tests.worker.fake_clock import FakeClock

STATS = EngineStats(
    num_running=2,
    num_waiting=1,
    waiting_tokens=100,
    num_receiving=1,
    blocks={"free": 5, "cached": 3, "in_use": 6, "receiving": 4, "quarantined": 2},
    free_blocks=8,
    fences_overdue=1,
    busy_seconds=1.0,
    overhead_seconds=0.1,
    num_steps=10,
    steps=[("decode", 0.02), ("decode", 0.03), ("prefill", 0.2)],
    prompt_tokens=50,
    prefill_tokens=40,
    generation_tokens=30,
    prefill_seconds=0.5,
    decode_seconds=0.4,
    prefix_query_tokens=60,
    prefix_hit_tokens=16,
    preemptions=1,
    bytes_sent=1000,
    bytes_received=2000,
    num_transfers=1,
    num_inputs=3,
    inputs_seconds=0.1,
    forward_seconds=0.6,
    sample_seconds=0.2,
    failed_rows={"not_finite": 2},
    evictions=4,
    batches=[(2, 0, 2, 0), (2, 0, 2, 0), (3, 90, 0, 10)],
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def engine(metrics: Metrics, clock: FakeClock) -> EngineMetrics:
    return EngineMetrics(metrics, clock)


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"pdcluster_{name}", labels)


def test_counters_move_by_the_difference(metrics, engine):
    engine.update(STATS)
    engine.update(
        msgspec.structs.replace(STATS, generation_tokens=35, bytes_sent=1500, num_steps=12)
    )

    assert sample(metrics, "generation_tokens_total") == 35
    assert sample(metrics, "prompt_tokens_total") == 50
    assert sample(metrics, "prefix_cache_hit_tokens_total") == 16
    assert sample(metrics, "kv_transfer_bytes_total", direction="sent") == 1500
    assert sample(metrics, "kv_transfer_bytes_total", direction="received") == 2000
    assert sample(metrics, "engine_steps_total") == 12


def test_steps_and_gauges_are_taken_as_they_are(metrics, engine):
    engine.update(STATS)

    assert sample(metrics, "engine_step_seconds_count", kind="decode") == 2
    assert sample(metrics, "engine_step_seconds_sum", kind="prefill") == pytest.approx(0.2)
    assert sample(metrics, "num_requests_running") == 2
    assert sample(metrics, "kv_blocks", state="quarantined") == 2
    assert sample(metrics, "kv_cache_usage_ratio") == pytest.approx(12 / 20)
    assert sample(metrics, "fences_overdue") == 1


def test_drafts_are_counted_by_position_and_by_what_a_step_gave(metrics, engine):
    engine.update(msgspec.structs.replace(STATS, drafted=[4, 2], accepted=[3, 1]))
    engine.update(msgspec.structs.replace(STATS, drafted=[9, 6, 1], accepted=[5, 2, 1]))

    drafted, accepted = (
        [sample(metrics, f"spec_decode_{name}_tokens_total", position=at) for at in "012"]
        for name in ("draft", "accepted")
    )
    assert (drafted, accepted) == ([9, 6, 1], [5, 2, 1])
    # Of nine: four had no draft that was right, three one, one two and one three.
    steps = [
        sample(metrics, "spec_decode_emitted_tokens_bucket", le=f"{most}.0")
        for most in (1, 2, 3, 4)
    ]
    assert steps == [4, 7, 8, 9]
    assert sample(metrics, "spec_decode_emitted_tokens_sum") == 9 + 5 + 2 + 1
    engine.forget(0, for_good=False)  # its successor counts from 0
    engine.update(msgspec.structs.replace(STATS, drafted=[1], accepted=[0]))
    assert sample(metrics, "spec_decode_emitted_tokens_count") == 10


def test_batches_are_counted_by_requests_and_by_kind_of_token(metrics, engine):
    """A kind that a step has none of is not observed."""
    engine.update(STATS)
    engine.update(msgspec.structs.replace(STATS, batches=[(1, 8, 0, 0)], evictions=9))

    assert sample(metrics, "engine_step_requests_sum") == 8
    assert sample(metrics, "engine_step_requests_bucket", le="2.0") == 3
    tokens = {
        kind: sample(metrics, "engine_step_tokens_sum", kind=kind)
        for kind in ("prefill", "decode", "recomputed")
    }
    assert tokens == {"prefill": 98, "decode": 4, "recomputed": 10}
    assert sample(metrics, "engine_step_tokens_count", kind="recomputed") == 1
    assert sample(metrics, "prefix_cache_evictions_total") == 9


def test_phases_and_failed_rows_move_by_the_difference(metrics, engine):
    engine.update(STATS)
    rows = {"not_finite": 3, "raised": 1}
    engine.update(msgspec.structs.replace(STATS, forward_seconds=0.9, failed_rows=rows))

    seconds = {
        p: sample(metrics, "engine_phase_seconds_total", phase=p)
        for p in ("inputs", "forward", "sample")
    }
    assert seconds == pytest.approx({"inputs": 0.1, "forward": 0.9, "sample": 0.2})
    assert sample(metrics, "engine_failed_rows_total", reason="not_finite") == 3
    assert sample(metrics, "engine_failed_rows_total", reason="raised") == 1
    assert sample(metrics, "engine_failed_rows_total", reason="no_token_left") == 0


def test_usage_of_an_engine_without_blocks_is_zero(metrics, engine):
    engine.update(msgspec.structs.replace(STATS, blocks={}))

    assert sample(metrics, "kv_cache_usage_ratio") == 0


def test_busy_ratio_is_over_the_last_seconds(metrics, engine, clock):
    ratios = [sample(metrics, "engine_busy_ratio")]
    for seconds, busy in ((2.0, 1.0), (3.0, 4.0), (5.0, 4.0), (60.0, 4.0), (0.1, 4.1)):
        clock.advance(seconds)
        engine.update(msgspec.structs.replace(STATS, busy_seconds=busy))
        ratios.append(sample(metrics, "engine_busy_ratio"))

    assert ratios == pytest.approx([0.0, 0.5, 0.8, 0.0, 0.0, 0.02])


def test_busy_ratio_falls_while_an_idle_engine_sends_nothing(metrics, engine, clock):
    clock.advance(5.0)
    engine.update(msgspec.structs.replace(STATS, busy_seconds=5.0))
    full = sample(metrics, "engine_busy_ratio")
    clock.advance(6.0)

    assert (full, sample(metrics, "engine_busy_ratio")) == (1.0, 0.0)


def test_constraints_are_counted_by_kind_and_their_compiles_timed(metrics, engine):
    report = {"constraint_requests": [("regex", 2), ("choice", 1)], "constraint_hits": 1}
    engine.update(
        msgspec.structs.replace(
            STATS, **report, constraint_compiles=[("compiled", 0.3), ("failed", 20.0)]
        )
    )
    engine.update(msgspec.structs.replace(STATS, **report))

    requests = [
        sample(metrics, "structured_requests_total", kind=kind)
        for kind in ("regex", "choice", "json_schema")
    ]
    assert requests == [4, 2, 0]
    assert sample(metrics, "grammar_cache_hits_total") == 2
    assert sample(metrics, "grammar_compile_seconds_count", outcome="compiled") == 1
    assert sample(metrics, "grammar_compile_seconds_sum", outcome="failed") == 20.0


def test_tiers_are_counted_by_name_over_all_engines(metrics, engine):
    host = TierStats("host", 100, stored=40, saved_bytes=500, loaded_bytes=70, evictions=3)
    disk = TierStats("disk", 900, stored=10, damaged=2, reason="No space left on device")
    disk.absent, disk.failures = 4, 5
    lookups = {"found": 3, "late": 1}
    first = msgspec.structs.replace(
        STATS, tiers=[host, disk], tier_reads={"read": 5, "slow": 1}, tier_lookups=lookups
    )
    engine.update(first)
    more = TierStats("host", 100, stored=50, saved_bytes=800, loaded_bytes=70, evictions=4)
    engine.update(msgspec.structs.replace(first, tiers=[more, disk], tier_reads={"read": 7}))
    engine.update(first, rank=1)

    assert sample(metrics, "kv_tier_blocks", tier="host", state="stored") == 90
    assert sample(metrics, "kv_tier_blocks", tier="disk", state="all") == 1800
    assert sample(metrics, "kv_tier_bytes_total", tier="host", direction="saved") == 1300
    assert sample(metrics, "kv_tier_bytes_total", tier="host", direction="loaded") == 140
    assert sample(metrics, "kv_tier_evictions_total", tier="host") == 7
    assert sample(metrics, "kv_tier_damaged_blocks_total", tier="disk") == 4
    assert sample(metrics, "kv_tier_stopped", tier="disk") == 2
    assert sample(metrics, "kv_tier_stopped", tier="host") == 0
    assert sample(metrics, "kv_tier_reads_total", choice="read") == 12
    assert sample(metrics, "kv_tier_reads_total", choice="slow") == 2
    assert sample(metrics, "kv_tier_absent_blocks_total", tier="disk") == 8
    assert sample(metrics, "kv_tier_failures_total", tier="disk") == 10
    assert sample(metrics, "kv_tier_lookups_total", outcome="found") == 6
    assert sample(metrics, "kv_tier_lookups_total", outcome="late") == 2
