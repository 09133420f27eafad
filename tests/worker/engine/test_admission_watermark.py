"""[V7]: a prompt is admitted whole or not at all, and beside others leaves a share of the pool."""

import pytest

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerSettings
from pdcluster_worker.messages.requests import SamplingParams


def make_tables(num_blocks=10, **sizes):
    settings = EngineSettings(
        4, num_blocks, max_batched_tokens=8, max_sequences=4, max_model_len=400, **sizes
    )
    return BlockTables(settings, BlockPool(num_blocks))


def make_request(name, num_tokens):
    return EngineRequest(
        name, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=3, seed=0)
    )


def test_watermark_counts_only_while_another_request_holds_blocks():
    """[V7], [V18]: needed + watermark > free is refused; an empty engine gives all it has."""
    tables = make_tables(admission_watermark=0.25)  # 2 of 10 blocks
    first, second = make_request("a", 12), make_request("b", 16)
    assert tables.reservation(second, 16).num_needed == 4
    tables.take(first, tables.reservation(first, 12))
    assert tables.reservation(second, 16).num_needed == 6
    tables.release(first)
    assert tables.reservation(second, 16).num_needed == 4


@pytest.mark.parametrize(
    ("name", "kept"),
    [("continuous", (0, 5)), ("prefill-first", (2, 5)), ("sarathi", (2, 5)), ("orca", (0, 5))],
)
def test_watermark_of_a_scheduler_is_the_least_of_the_one_that_is_set(name, kept):
    """[A3]: one block of each hundred, rounded up."""
    own = SchedulerSettings(name=name, policy="fcfs")
    sizes = {"num_blocks": 101, "scheduler": own}
    assert (
        tuple(make_tables(**sizes, admission_watermark=share)._num_kept for share in (0.0, 0.05))
        == kept
    )


def test_watermark_is_no_bound_of_growth():
    """[V7]: what is kept free is for running requests to grow into."""
    tables = make_tables(num_blocks=4, admission_watermark=0.5)
    request, other = make_request("a", 8), make_request("b", 4)
    tables.take(request, tables.reservation(request, 8))
    assert tables.reservation(other, 4).num_needed > tables.pool.num_available
    assert tables.grow(request, 16)


@pytest.mark.parametrize(("watermark", "num_together"), [(0.0, 3), (0.3, 2)])
def test_requests_under_a_watermark_run_after_one_another_and_are_preempted_less(
    engine, spec, watermark, num_together
):
    """[V7]: three prompts of 4 blocks fill a pool of 13; beside 3 kept blocks the third waits."""
    rig = engine(num_blocks=13, max_batched_tokens=64, admission_watermark=watermark)
    prompts = {
        name: [*range(start, start + 15)] for name, start in (("a", 0), ("b", 100), ("c", 200))
    }
    rig.submit(prompts, max_tokens=6)
    assert len(rig.runner.executed[0]) == num_together
    rig.run()
    rig.check(prompts, 6)
    assert (rig.stats.preemptions > 0) is (watermark == 0.0)


def test_request_as_large_as_the_pool_runs_alone_whatever_the_watermark(engine, spec):
    """[V7]: the watermark holds a large request until the others are done, no longer."""
    rig = engine(num_blocks=6, admission_watermark=0.9)
    rig.handle(
        m.Submit(spec("a", [1, 2, 3], max_tokens=4)),
        m.Submit(spec("b", list(range(21)), max_tokens=3)),
    )
    rig.run()
    assert rig.token_ids("b") == rig.runner.reference(list(range(21)), 3)


def test_prompt_is_admitted_whole_and_not_by_its_first_chunk(engine, spec):
    """[V7]: the first chunk of b would find room, its prompt does not."""
    rig = engine(num_blocks=8, max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", list(range(12)), max_tokens=6)))
    rig.step()
    rig.handle(m.Submit(spec("b", list(range(50, 70)), max_tokens=1)))
    assert all("b" not in dict(items) for items in rig.runner.executed)
    rig.run()
    assert rig.token_ids("b") == rig.runner.reference(list(range(50, 70)), 1)
    assert rig.stats.preemptions == 0


def test_transfer_is_refused_below_the_watermark_and_taken_once_the_others_are_gone(pair, spec):
    """[V7]: a peer's prefill is admission too; what it waits for is said."""
    both = pair(decode={"num_blocks": 8, "admission_watermark": 0.5})
    both.decode.handle(m.Submit(spec("a", [1, 2], max_tokens=20)))
    both.decode.handle(m.Receive(spec("b", list(range(9)))))
    (refused,) = both.decode.of(m.ReceiveRefused)
    assert refused.needed_blocks == 8  # 3 for b, 4 kept, 1 for a to grow
    both.decode.handle(m.Abort("a"))
    both.decode.handle(m.Receive(spec("b", list(range(9)))))
    assert len(both.decode.of(m.ReceiveReady)) == 1
