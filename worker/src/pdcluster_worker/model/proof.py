"""The comparison that our decoder must pass before it serves: its logits beside those of transformers' module.

Both compute the same two short sequences over the KV cache, as a prefill and as
a decode step after it.  A part that a family's traits do not name (a bias, a
scale, another rotation) shows as a difference far above rounding.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.request import Request
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.step_plan import StepPlanner

LONG, SHORT = 21, 6
"""Tokens of the two sequences, where the cache holds them; the last of each is a decode step."""

MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.08}
"""Of the logits, relative to their size: what rounding in another order leaves, with room."""


def difference(ours: Forward, theirs: Forward, *, block_size: int, num_blocks: int, max_tokens: int, vocab_size: int) -> float:
    """Norm of the difference of both models' logits over the norm of theirs; NaN counts as infinite.

    max_tokens: of one sequence.
    Writes to the first blocks of each one's KV cache, of at least `num_blocks`: none may have an owner yet.
    """
    lengths = min(LONG, (num_blocks - 1) * block_size, max_tokens), min(SHORT, block_size, max_tokens)
    mine, wanted = (_logits(forward, lengths, block_size, vocab_size) for forward in (ours, theirs))
    found = float((mine - wanted).norm() / wanted.norm())
    return found if found == found else float("inf")


def num_blocks(block_size: int) -> int:
    """Blocks that the comparison writes to where there are enough."""
    return -(-LONG // block_size) + -(-min(SHORT, block_size) // block_size)


def _logits(forward: Forward, lengths: Sequence[int], block_size: int, vocab_size: int) -> Tensor:
    """Logits of every token of both sequences, [sum of lengths, vocab_size]."""
    requests = _requests(lengths, block_size, vocab_size)
    num_blocks = max(len(request.block_table) for request in requests)
    planner = StepPlanner(block_size=block_size, max_sequences=len(lengths), max_tokens=sum(lengths), max_blocks=num_blocks)
    rows = []
    for counts in ([length - 1 for length in lengths], [1] * len(lengths)):
        items = [Scheduled(request, count) for request, count in zip(requests, counts, strict=True) if count]
        if not items:
            continue
        plan = planner.plan(Batch(tuple(items)))
        with torch.inference_mode():
            logits = forward.logits(replace(plan, sample_at=torch.arange(plan.num_tokens)))
            rows.append(logits.cpu().clone())  # they hold until the next step
        for item in items:
            item.request.num_computed_tokens += item.num_tokens
    return torch.cat(rows)


def _requests(lengths: Sequence[int], block_size: int, vocab_size: int) -> list[Request]:
    requests, first = [], 0
    for number, length in enumerate(lengths):
        tokens = [(7919 * (place + 1) + 31 * number) % vocab_size for place in range(length)]
        last = first - (-length // block_size)
        sampling = Sampling(max_tokens=1, seed=0)
        requests.append(Request(f"proof-{number}", tokens, length, sampling, block_table=list(range(first, last))))
        first = last
    return requests
