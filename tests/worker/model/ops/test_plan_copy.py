"""The plan in one buffer, as a device reads it; here the device is the CPU."""

from dataclasses import replace

import torch

from pdcluster_worker.model.ops.graphs import Graphs, PlanCopy, example_plan, graph_for, pad_decodes
from pdcluster_worker.model.step_plan import StepLimits, StepPlan
from tests.worker.model.ops import paged_steps as cases

MIXED = cases.Case("mixed", ((12, 1), (3, 1), (40, 25), (2, 2)), padding=2)
DECODES = cases.Case("decodes", ((9, 1), (30, 1), (2, 1)), padding=5)
KEPT = ("token_ids", "positions", "slots", "sample_at", "firsts", "lengths", "contexts")


def make_copy() -> PlanCopy:
    return PlanCopy(
        torch.device("cpu"), StepLimits(max_tokens=64, max_sequences=8, longest=64, block_size=4)
    )


def blocks_of(plan: StepPlan, index: int) -> list[int]:
    needed = -(-int(plan.contexts[index]) // 4)
    return plan.tables[int(plan.table_rows[index]), :needed].tolist()


def test_placed_plan_says_what_the_plan_says() -> None:
    plan = cases.make_step(MIXED).plan

    placed = make_copy().place(plan)

    assert all(torch.equal(getattr(placed, name), getattr(plan, name)) for name in KEPT)
    assert [blocks_of(placed, index) for index in range(4)] == [
        blocks_of(plan, index) for index in range(4)
    ]
    assert (placed.num_tokens, placed.num_decodes, placed.longest) == (
        plan.num_tokens,
        plan.num_decodes,
        plan.longest,
    )


def test_arrays_of_a_size_stay_where_they_are_whatever_the_contexts() -> None:
    """A captured graph reads them there."""
    copy = make_copy()
    short, long = (
        cases.make_step(cases.Case("", ((context, 1), (2, 1)))).plan for context in (3, 60)
    )

    def places(plan: StepPlan) -> dict[str, object]:
        placed = copy.place(plan)
        found = {name: getattr(placed, name).data_ptr() for name in (*KEPT, "table_rows", "tables")}
        return {**found, "strides": placed.tables.stride()}

    assert places(long) == places(short)


def test_host_buffers_take_turns() -> None:
    """The next plan is written while the last one may still be on its way."""
    copy = make_copy()
    plan = cases.make_step(MIXED).plan
    copy.place(plan)
    before = [host.clone() for host in copy._hosts]

    copy.place(cases.make_step(DECODES).plan)

    assert [torch.equal(host, old) for host, old in zip(copy._hosts, before, strict=True)].count(
        True
    ) == 1


def test_decodes_are_padded_with_sequences_of_no_context() -> None:
    plan = cases.make_step(DECODES).plan

    padded = pad_decodes(plan)

    assert (padded.num_tokens, padded.num_decodes) == (8, 8)
    assert padded.contexts.tolist() == [*plan.contexts.tolist(), 0, 0, 0, 0, 0]
    assert padded.firsts.tolist() == padded.sample_at.tolist() == list(range(8))
    assert padded.slots.tolist() == [*plan.slots[:3].tolist(), -1, -1, -1, -1, -1]
    assert len({len(padded.table_rows), len(padded.lengths), 8}) == 1


def test_graph_computes_decodes_of_its_size_alone() -> None:
    decodes, mixed = cases.make_step(DECODES).plan, cases.make_step(MIXED).plan

    assert graph_for(decodes, {8, 4}) == 8
    assert graph_for(decodes, {4}) is None
    assert graph_for(mixed, {len(mixed.token_ids)}) is None


def test_a_step_with_adapters_has_its_rows_on_the_device_and_no_graph() -> None:
    plan = replace(
        cases.make_step(DECODES).plan,
        adapter_rows=torch.tensor([1, 0]),
        adapter_runs=torch.tensor([[0, 1], [2, 1]], dtype=torch.int32),
    )
    placed = make_copy().place(plan)
    assert torch.equal(placed.adapter_rows, plan.adapter_rows)
    assert placed.adapter_runs is plan.adapter_runs
    assert graph_for(plan, {8, 4}) is None


def test_example_plan_has_the_places_of_a_padded_one() -> None:
    """Plan that a graph is captured with, and the one it is run with."""
    copy = make_copy()
    example = copy.place(example_plan(8, longest=64))
    places = {name: getattr(example, name).data_ptr() for name in (*KEPT, "table_rows", "tables")}
    assert not example.contexts.any()
    assert set(example.slots.tolist()) == {-1}

    placed = copy.place(pad_decodes(cases.make_step(DECODES).plan))

    assert {name: getattr(placed, name).data_ptr() for name in places} == places
    assert {name: getattr(placed, name).shape for name in KEPT} == {
        name: getattr(example, name).shape for name in KEPT
    }


def test_step_that_no_graph_holds_runs_as_it_is_with_its_plan_on_the_device() -> None:
    begun, run = [], []
    plan = cases.make_step(MIXED).plan

    def forward(placed: StepPlan) -> torch.Tensor:
        run.append(placed)
        return placed.sample_at.float()

    logits = Graphs(make_copy(), forward, begun.append, longest=64).logits(plan)

    assert begun == [plan]
    assert torch.equal(logits, plan.sample_at.float())
    assert run[0].slots.data_ptr() != plan.slots.data_ptr()


def test_every_row_of_the_largest_step_may_be_sampled() -> None:
    """As where the log probabilities of a prompt are asked for."""
    plan = cases.make_step(cases.Case("whole", ((64, 64),))).plan
    copy = PlanCopy(
        torch.device("cpu"), StepLimits(max_tokens=64, max_sequences=1, longest=64, block_size=4)
    )
    placed = copy.place(replace(plan, sample_at=torch.arange(64)))
    assert placed.sample_at.tolist() == list(range(64))
