"""Rows of drafts: planned as decodes of their own, sampled as the request will be once they are
accepted.
"""

from typing import Any

import torch

from pdcluster_worker.engine.request import (
    AfterDrafts,
    Batch,
    EngineRequest,
    Scheduled,
    sample_places,
)
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.sampling.penalties import PenaltyState
from pdcluster_worker.model.sampling.sampler import Sampler
from pdcluster_worker.model.step_plan import StepLimits, StepPlanner

VOCAB = 40
DRAWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.4,
}


def drawn_request(tokens: list[int], name: str = "a", **sampling: Any) -> EngineRequest:
    values = (
        DRAWN
        | {"logprobs": 2, "min_tokens": 4, "eos_token_ids": [3], "logit_bias": {7: 1.5}}
        | sampling
    )
    return EngineRequest(name, list(tokens), 3, SamplingParams(max_tokens=50, seed=9, **values))


def test_drafts_are_planned_as_decodes_of_one_table() -> None:
    planner = StepPlanner(StepLimits(64, 3, longest=32, block_size=4, max_decode_rows=12))
    one = EngineRequest(
        "one",
        list(range(100, 107)),
        5,
        SamplingParams(max_tokens=9, seed=0),
        num_computed_tokens=6,
        block_table=[5, 2, 9],
    )
    two = EngineRequest(
        "two", list(range(6)), 6, SamplingParams(max_tokens=9, seed=0), block_table=[7, 8]
    )
    plan = planner.plan(Batch((Scheduled(one, 4, 6, True, (31, 32, 33)), Scheduled.of(two, 6))))
    assert plan.token_ids[:4].tolist() == [106, 31, 32, 33]
    assert plan.positions[:4].tolist() == [6, 7, 8, 9]
    assert plan.slots[:4].tolist() == [10, 11, 36, 37]
    assert (plan.num_decodes, plan.num_tokens, plan.longest) == (4, 10, 10)
    assert plan.firsts.tolist() == [0, 1, 2, 3, 4]
    assert plan.lengths.tolist() == [1, 1, 1, 1, 6]
    assert plan.contexts.tolist() == [7, 8, 9, 10, 6]
    assert len(set(plan.table_rows[:4].tolist())) == 1
    assert plan.tables[plan.table_rows[0], :3].tolist() == [5, 2, 9]
    assert plan.sample_at.tolist() == [0, 1, 2, 3, 9]


def test_each_draft_is_sampled_as_if_it_were_known_and_leaves_no_trace() -> None:
    """Penalties, the draw's position, min_tokens, biases and log probabilities at every drafted
    place.
    """
    known, drafts = [1, 2, 3, 4, 5], (4, 11, 4)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    sampler = Sampler(VOCAB)
    rows = sample_places(Scheduled(drawn_request(known), 4, 4, True, drafts))
    together = sampler.sample(logits, rows)
    for row in range(4):
        alone = Sampler(VOCAB).sample(
            logits[row : row + 1].clone(), [drawn_request([*known, *drafts[:row]])]
        )
        assert together[row] == alone[0]
    # Other tokens than the drafts follow, though the last of them is the same.
    after = drawn_request([*known, 20, 21, 4])
    assert sampler.sample(logits[:1], [after]) == Sampler(VOCAB).sample(
        logits[:1], [drawn_request(after.tokens)]
    )


def test_counts_after_drafts_are_those_of_the_longer_request() -> None:
    base = drawn_request([1, 2, 3, 4, 4])
    counts = PenaltyState(VOCAB).counts(base)
    ids, occurrences = counts.after((4, 9, 9, 1))
    longer = PenaltyState(VOCAB).counts(drawn_request([*base.tokens, 4, 9, 9, 1]))
    assert dict(zip(ids.tolist(), occurrences.tolist(), strict=True)) == dict(
        zip(longer.ids.tolist(), longer.occurrences.tolist(), strict=True)
    )
    assert counts.num_counted == 5
    place = AfterDrafts(base, (4, 9))
    assert (place.num_tokens, place.num_output_tokens, place.request_id) == (7, 4, "a")
