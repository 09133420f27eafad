"""Sarathi's stall-free batches, written out [A1] [A2] [A3] [A4] [A6]; each batch as the runner was
given it.
"""

import pytest

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.sarathi import ChunkBudget, Sarathi, aligned, stage_sizes
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import (
    ChunkSchedule,
    EngineSettings,
    SchedulerSettings,
)
from pdcluster_worker.messages.requests import SamplingParams

SARATHI = SchedulerSettings(name="sarathi")


@pytest.fixture
def sarathi(engine):
    """Builds a rig with this scheduler; further fields of it in `own`."""
    return lambda own=SARATHI, **sizes: engine(scheduler=own, **sizes)


def test_a1_decodes_come_first_and_chunks_fill_the_budget(sarathi, spec):
    """The module's worked example: no decode ever waits for c or d."""
    rig = sarathi(max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", [1], max_tokens=9)), m.Submit(spec("b", [2], max_tokens=9)))
    rig.handle(m.Submit(spec("c", range(12))), m.Submit(spec("d", [7, 8, 9])))
    rig.step()
    rig.step()
    assert rig.runner.executed[1:] == [
        [("a", 1), ("b", 1), ("c", 6)],
        [("a", 1), ("b", 1), ("c", 6)],
        [("a", 1), ("b", 1), ("c", 1), ("d", 3)],
    ]


def test_a1_an_unfinished_prefill_goes_on_before_a_new_one_starts(sarathi, spec):
    rig = sarathi(max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", range(10))), m.Submit(spec("b", range(20, 30))))
    rig.step()
    assert rig.runner.executed == [[("a", 8)], [("a", 2), ("b", 6)]]


def test_a2_a_prefill_whose_chunk_is_cut_to_nothing_stays_in_its_seat(sarathi, spec):
    rig = sarathi(max_batched_tokens=4, max_sequences=4, block_size=2, num_blocks=32)
    rig.handle(m.Submit(spec("a", [1], max_tokens=9)), m.Submit(spec("b", [2], max_tokens=9)))
    rig.handle(m.Submit(spec("c", range(30, 37))), m.Submit(spec("d", range(40, 44))))
    rig.step()
    batches = rig.runner.executed
    assert batches[1:] == [[("a", 1), ("b", 1), ("c", 2)], [("a", 1), ("b", 1), ("c", 2)]]
    assert len(rig.core._scheduler.running) == 3
    rig.run()
    assert rig.token_ids("d") == rig.runner.reference(list(range(40, 44)), 3)


def test_a3_admission_needs_all_blocks_of_the_prompt_above_the_watermark(sarathi, spec):
    """200 blocks, 50 of them a's: 2 stay free, so b may take 148 and not 149."""
    for num_tokens, admitted in [(4 * 148, True), (4 * 148 + 1, False)]:
        rig = sarathi(num_blocks=200, max_batched_tokens=1000, max_model_len=1000)
        rig.handle(m.Submit(spec("a", range(4 * 49), max_tokens=9)))
        rig.handle(m.Submit(spec("b", [5] * num_tokens, max_tokens=2)))
        assert (rig.core._scheduler.waiting == []) is admitted
        rig.run()
        assert len(rig.token_ids("b")) == 2


def test_a3_a_prompt_of_the_whole_pool_is_admitted_when_nothing_runs(sarathi, spec):
    rig = sarathi(num_blocks=8)
    rig.handle(m.Submit(spec("a", range(32), max_tokens=1)))
    assert rig.token_ids("a") == rig.runner.reference(list(range(32)), 1)


def test_a3_blocks_are_promised_at_admission_and_taken_chunk_by_chunk(sarathi, spec):
    """a takes 2 of its 10 blocks, and b is not admitted on the other 8."""
    rig = sarathi(num_blocks=16, max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", range(40), max_tokens=1)), m.Submit(spec("b", range(50, 80))))
    assert rig.blocks == {"free": 14, "in_use": 2}
    assert len(rig.core._scheduler.running) == 1
    refused = rig.handle(m.Receive(spec("remote", range(20))))
    assert any(isinstance(output, m.ReceiveRefused) for output in refused)


def build(num_blocks=16, **sizes):
    """A scheduler by itself, and its pool."""
    values = {"block_size": 4, "max_batched_tokens": 16, "max_sequences": 8, "max_model_len": 100}
    settings = EngineSettings(num_blocks=num_blocks, scheduler=SARATHI, **(values | sizes))
    tables = BlockTables(settings, BlockPool(num_blocks))
    return Sarathi(settings, tables), tables


def request_of(name, num_prompt, num_output=0, arrival=0.0):
    sampling = SamplingParams(max_tokens=50, seed=0)
    tokens = [ord(name)] * (num_prompt + num_output)
    return EngineRequest(name, tokens, num_prompt, sampling, arrival_seconds=arrival)


def holding(tables, request):
    """The request with all its KV but that of its last token."""
    tables.take(request, tables.reservation(request, request.num_tokens))
    request.num_computed_tokens = request.num_tokens - 1
    return request


def planned(step):
    return [(request.request_id, item.num_tokens) for request, item in step.items.items()]


def ran(scheduler, tables, step):
    """As if the step had run: every item that samples gets a token."""
    for request, item in step.items.items():
        samples = item.samples
        tables.advance(request, item.num_tokens)
        if samples:
            request.tokens.append(ord(request.request_id) + 1)


def test_a_chunk_is_cut_to_the_free_blocks():
    """Others took what was promised: c's chunk of 12 becomes one of 4, then none, and c stays."""
    scheduler, tables = build(num_blocks=6)
    scheduler.add(request_of("c", 20))
    step = scheduler.schedule()
    assert planned(step) == [("c", 16)]
    ran(scheduler, tables, step)
    taken = tables.pool.allocate(2)
    scheduler.add_ready(holding_one(tables, "a"))
    assert planned(scheduler.schedule()) == [("a", 1)]
    tables.pool.release(taken)
    assert planned(scheduler.schedule()) == [("a", 1), ("c", 4)]


def holding_one(tables, name):
    """A request that decodes and has room for its next token; no block is taken for it here."""
    request = request_of(name, 1, 1)
    request.block_table = []
    request.num_computed_tokens = 1
    tables.grow = _grow_unless(tables.grow, request)
    return request


def _grow_unless(grow, request):
    return lambda other, num_tokens: True if other is request else grow(other, num_tokens)


def test_a_decode_without_a_block_sits_out_while_another_goes_on():
    """a fills its block, b has room left in its own: no preemption, for b's end frees a block."""
    scheduler, tables = build(num_blocks=2)
    a = holding(tables, request_of("a", 3, 1, arrival=1.0))
    b = holding(tables, request_of("b", 1, 1, arrival=2.0))
    scheduler.add_ready(a)
    scheduler.add_ready(b)
    first = scheduler.schedule()
    assert planned(first) == [("a", 1), ("b", 1)]
    ran(scheduler, tables, first)
    second = scheduler.schedule()
    assert planned(second) == [("b", 1)]
    assert second.preempted == []
    tables.release(b)
    scheduler.remove(b)
    assert planned(scheduler.schedule()) == [("a", 1)]


def test_where_all_decodes_lack_a_block_the_last_is_preempted():
    """[A1]: progress comes before keeping what is computed."""
    scheduler, tables = build(num_blocks=2)
    for name, arrival in [("a", 1.0), ("b", 2.0)]:
        scheduler.add_ready(holding(tables, request_of(name, 3, 1, arrival)))
    ran(scheduler, tables, scheduler.schedule())
    step = scheduler.schedule()
    assert planned(step) == [("a", 1)]
    assert [request.request_id for request in step.preempted] == ["b"]


def test_where_no_chunk_finds_a_block_the_last_prefill_gives_its_own():
    """Others took what was promised to c, and nothing else runs: it starts again when they are
    gone.
    """
    scheduler, tables = build(num_blocks=6)
    scheduler.add(request_of("c", 20))
    ran(scheduler, tables, scheduler.schedule())
    taken = tables.pool.allocate(2)
    step = scheduler.schedule()
    assert planned(step) == []
    assert [request.request_id for request in step.preempted] == ["c"]
    assert not scheduler.schedule().progressed
    tables.pool.release(taken)
    assert planned(scheduler.schedule()) == [("c", 4)]  # the 16 that are cached still count


def test_a_decode_takes_the_block_of_an_unfinished_prefill():
    """[A1]: decodes are not stalled by prefills, not by their memory either."""
    scheduler, tables = build(num_blocks=5, max_batched_tokens=9)
    scheduler.add_ready(holding(tables, request_of("a", 3, 1, arrival=1.0)))
    scheduler.add(request_of("p", 12, arrival=2.0))
    step = scheduler.schedule()
    assert planned(step) == [("a", 1), ("p", 8)]
    ran(scheduler, tables, step)
    tables.pool.allocate(2)
    step = scheduler.schedule()
    assert planned(step) == [("a", 1)]
    assert [request.request_id for request in step.preempted] == ["p"]


def test_a4_sizes_go_from_high_to_low_in_multiples_of_32():
    assert stage_sizes(ChunkSchedule(low=64, high=512, stages=4, max_tokens=4096)) == [
        512,
        352,
        224,
        64,
    ]
    assert stage_sizes(ChunkSchedule(low=8, high=8, stages=1, max_tokens=10)) == [8]


def test_a4_chunks_shrink_with_the_length_that_is_behind_them(sarathi, spec):
    """3 stages of 20 tokens each: the second chunk starts at 24, in the second stage."""
    chunks = ChunkSchedule(low=8, high=24, stages=3, max_tokens=60)
    own = SchedulerSettings(name="sarathi", chunk_schedule=chunks)
    rig = sarathi(own, max_batched_tokens=32)
    rig.serve(spec("a", [3] * 60, max_tokens=1))
    assert rig.runner.executed == [[("a", size)] for size in (24, 16, 8, 8, 4)]


def test_the_next_budget_follows_the_time_of_the_last_step(sarathi, spec):
    """2 ms a token against 40 ms: 64 tokens are too many, the next step has 32, then less."""
    own = SchedulerSettings(name="sarathi", tbt_slo_seconds=0.040)
    rig = sarathi(own, max_batched_tokens=64, num_blocks=64, max_model_len=256)
    rig.runner.on_write = lambda block: rig.clock.advance(0.002)
    rig.serve(spec("a", [4] * 130, max_tokens=1))
    sizes = [count for batch in rig.runner.executed for _, count in batch]
    assert sizes == [64, 32, 18, 16]


@pytest.mark.parametrize(
    ("fixed", "per_token", "fits"), [(0.0, 1e-4, 896), (0.02, 1e-4, 640), (0.05, 2e-4, 128)]
)
def test_a6_the_budget_comes_to_the_largest_that_fits_and_stays(fixed, per_token, fits):
    """Steps of fixed + per_token * tokens seconds against 0.1 s, from either side, in
    whole tiles.
    """
    for start in (8192, 64):
        budget = ChunkBudget(8192, 16, 0.1)
        budget.num_tokens = start
        seen = []
        for _ in range(60):
            budget.adjust(budget.num_tokens, fixed + per_token * budget.num_tokens)
            seen.append(budget.num_tokens)
        assert len(set(seen[-10:])) == 1
        assert fixed + per_token * seen[-1] <= 0.1
        assert seen[-1] >= fits // 2
        assert seen[-1] % 32 == 0


def test_one_slow_step_halves_the_budget_at_most_and_a_small_step_tells_nothing():
    budget = ChunkBudget(1024, 16, 0.1)
    budget.adjust(1024, 60.0)
    assert budget.num_tokens == 512
    budget.adjust(3, 0.001)
    assert budget.num_tokens == 512
    budget.adjust(512, 0.04)
    assert budget.num_tokens == 1024


def test_without_a_target_the_budget_stays():
    budget = ChunkBudget(300, 16, None)
    budget.adjust(300, 60.0)
    assert budget.num_tokens == 300


def test_prompts_go_on_however_slow_the_decodes_are(sarathi, spec):
    """The target cannot be met: a block of a prompt goes into each step all the same."""
    own = SchedulerSettings(name="sarathi", tbt_slo_seconds=0.001)
    rig = sarathi(own, num_blocks=64)
    rig.runner.on_execute = lambda: rig.clock.advance(1.0)
    rig.handle(m.Submit(spec("a", [1], max_tokens=30)))
    for _ in range(6):
        rig.step()
    rig.serve(spec("b", range(20), max_tokens=1))
    assert [count for batch in rig.runner.executed for name, count in batch if name == "b"] == [
        4
    ] * 5


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(8, 8), (63, 63), (64, 64), (100, 96), (255, 224), (300, 256), (1000, 896)],
)
def test_budgets_waste_no_part_of_a_tile(num_tokens, expected):
    assert aligned(num_tokens) == expected
