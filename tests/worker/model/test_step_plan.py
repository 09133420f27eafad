"""Plan of a step made from a batch: flat order, padding, slots, and block tables that are kept from
step to step.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.step_plan import (
    NO_SLOT,
    StepLimits,
    StepPlanner,
    padded_rows,
    row_sizes,
)

SIZE = 4


def scheduled(name, num_tokens, computed, count, table=(7, 3, 5, 1), adapter=""):
    request = EngineRequest(
        name,
        list(range(100, 100 + num_tokens)),
        num_tokens,
        SamplingParams(max_tokens=9, seed=0),
        adapter=adapter,
    )
    request.num_computed_tokens = computed
    request.block_table = list(table)
    return Scheduled.of(request, count)


@pytest.fixture
def planner():
    return StepPlanner(StepLimits(40, 3, longest=6 * SIZE, block_size=SIZE))


def table_of(plan, sequence):
    """Block ids of a sequence's context."""
    return plan.tables[
        plan.table_rows[sequence], : -(-int(plan.contexts[sequence]) // SIZE)
    ].tolist()


def test_items_are_laid_out_flat_in_batch_order_and_padded(planner):
    plan = planner.plan(
        Batch((scheduled("a", 6, 5, 1), scheduled("b", 9, 2, 3), scheduled("c", 3, 0, 3)))
    )
    assert (plan.num_tokens, len(plan.token_ids)) == (7, 8)
    assert plan.token_ids.tolist() == [105, 102, 103, 104, 100, 101, 102, 0]
    assert plan.positions.tolist() == [5, 2, 3, 4, 0, 1, 2, 0]
    assert plan.slots.tolist() == [
        3 * 4 + 1,
        7 * 4 + 2,
        7 * 4 + 3,
        3 * 4,
        7 * 4,
        7 * 4 + 1,
        7 * 4 + 2,
        NO_SLOT,
    ]
    assert plan.sample_at.tolist() == [0, 6]  # the middle one is not at its end
    assert plan.longest == 6


def test_decodes_come_first_among_the_sequences_wherever_their_rows_are(planner):
    plan = planner.plan(
        Batch((scheduled("a", 9, 2, 3), scheduled("b", 6, 5, 1), scheduled("c", 3, 0, 2)))
    )
    assert plan.num_decodes == 1
    assert plan.firsts.tolist() == [3, 0, 4]
    assert plan.lengths.tolist() == [1, 3, 2]
    assert plan.contexts.tolist() == [6, 5, 2]
    assert [table_of(plan, sequence) for sequence in range(3)] == [[7, 3], [7, 3], [7]]


def test_rows_of_an_adapter_are_together_wherever_they_are():
    limits = StepLimits(40, 4, longest=6 * SIZE, block_size=SIZE)
    planner = StepPlanner(limits, adapters={"sql": 0, "fr": 1})
    items = [("a", 6, 5, 1, "fr"), ("b", 9, 2, 3, ""), ("c", 3, 0, 3, "sql"), ("d", 4, 3, 1, "fr")]
    batch = [scheduled(*sizes, adapter=adapter) for *sizes, adapter in items]
    plan = planner.plan(Batch(tuple(batch)))
    assert plan.adapter_rows.tolist() == [4, 5, 6, 0, 7]
    assert plan.adapter_runs.tolist() == [[0, 3], [1, 2]]
    plain = planner.plan(Batch((batch[1],)))
    assert (len(plain.adapter_rows), len(plain.adapter_runs)) == (0, 0)


def test_table_that_has_grown_is_extended(planner):
    item = scheduled("a", 4, 3, 1, table=[2])
    assert table_of(planner.plan(Batch((item,))), 0) == [2]
    item.request.block_table += [9]
    item.request.tokens.append(1)
    item.request.num_computed_tokens = 4
    plan = planner.plan(Batch((Scheduled.of(item.request, 1),)))
    assert (table_of(plan, 0), plan.slots.tolist()) == ([2, 9], [9 * SIZE])


def test_table_of_a_request_that_was_preempted_is_read_again(planner):
    item = scheduled("a", 8, 7, 1, table=[2, 4])
    planner.plan(Batch((item,)))
    item.request.block_table = [6, 5]
    assert table_of(planner.plan(Batch((item,))), 0) == [6, 5]


def test_seats_of_requests_that_are_not_scheduled_are_given_away_when_all_are_taken(planner):
    for name, block in (("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 5)):
        plan = planner.plan(Batch((scheduled(name, 3, 2, 1, table=[block]),)))
        assert table_of(plan, 0) == [block]


def test_forgotten_requests_leave_their_seats(planner):
    for number in range(20):
        plan = planner.plan(Batch((scheduled(f"r{number}", 3, 2, 1, table=[number]),)))
        assert table_of(plan, 0) == [number]
        planner.forget(f"r{number}")
    planner.forget("unknown")


@given(st.integers(1, 5000))
def test_padding_is_bounded_and_no_size_is_met_that_was_not_warmed(num_tokens):
    rows = padded_rows(num_tokens)
    assert num_tokens <= rows <= max(2 * num_tokens, num_tokens + 15)
    assert rows in row_sizes(num_tokens)
    assert padded_rows(rows) == rows
