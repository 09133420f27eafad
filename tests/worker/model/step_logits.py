"""Logits of two sequences, each a prefill and then decode steps, by any forward pass."""

from dataclasses import replace

import torch
from torch import Tensor

from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.decoder import Forward
from pdcluster_worker.model.step_plan import StepLimits, StepPlanner

BLOCK_SIZE = 16
LENGTHS = (40, 6)
NUM_BLOCKS = 4


def step_logits(forward: Forward, vocab_size: int) -> Tensor:
    """[sum(LENGTHS), vocab_size] float32."""
    requests = [
        _request("long", 0, (0, 1, 2), vocab_size),
        _request("short", 1, (3,), vocab_size),
    ]
    planner = StepPlanner(StepLimits(64, 2, longest=3 * BLOCK_SIZE, block_size=BLOCK_SIZE))
    rows: dict[str, list[Tensor]] = {request.request_id: [] for request in requests}
    for counts in ([length - 2 for length in LENGTHS], [1, 1], [1, 1]):
        items = [Scheduled.of(*pair) for pair in zip(requests, counts, strict=True)]
        plan = planner.plan(Batch(tuple(items)))
        with torch.inference_mode():
            logits = forward.logits(replace(plan, sample_at=torch.arange(plan.num_tokens))).clone()
        for item, part in zip(items, torch.split(logits, counts), strict=True):
            rows[item.request.request_id].append(part)
            item.request.num_computed_tokens += item.num_tokens
    return torch.cat([part for parts in rows.values() for part in parts])


def _request(name: str, number: int, blocks: tuple[int, ...], vocab_size: int) -> EngineRequest:
    tokens = tokens_of(number, vocab_size)
    sampling = SamplingParams(max_tokens=1, seed=0)
    return EngineRequest(name, tokens, len(tokens), sampling, block_table=list(blocks))


def tokens_of(number: int, vocab_size: int) -> list[int]:
    """The tokens of a sequence of LENGTHS."""
    return [(7919 * (place + 1) + 31 * number) % vocab_size for place in range(LENGTHS[number])]
