"""Cuts the plan of a step into micro-batches for pipeline stages; a cut may split a sequence."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdcluster_worker.model.step_plan import NO_SLOT, StepPlan, padded_rows


def plan_parts(plan: StepPlan, count: int) -> list[StepPlan]:
    """At most `count` plans, of about equally many rows each."""
    count = min(count, plan.num_tokens)
    if count <= 1:
        return [plan]
    edges = [plan.num_tokens * index // count for index in range(count + 1)]
    return [_part(plan, first, last) for first, last in pairwise(edges)]


def _part(plan: StepPlan, first: int, last: int) -> StepPlan:
    """Rows [first, last) of a plan."""
    firsts, ends = plan.firsts.numpy(), plan.firsts.numpy() + plan.lengths.numpy()
    starts, stops = np.maximum(firsts, first), np.minimum(ends, last)
    lengths = stops - starts
    contexts = plan.contexts.numpy() - (ends - stops)  # up to and with its last row here
    inside = np.flatnonzero(lengths > 0)
    order = inside[np.argsort(lengths[inside] > 1, kind="stable")]  # decodes first
    samples = plan.sample_at[(plan.sample_at >= first) & (plan.sample_at < last)] - first
    rows = padded_rows(last - first)
    return replace(
        plan,
        num_tokens=last - first,
        num_decodes=int((lengths[inside] == 1).sum()),
        longest=int(contexts[inside].max()),
        token_ids=_rows(plan.token_ids[first:last], rows, 0),
        positions=_rows(plan.positions[first:last], rows, 0),
        slots=_rows(plan.slots[first:last], rows, NO_SLOT),
        firsts=_narrow((starts - first)[order]),
        lengths=_narrow(lengths[order]),
        contexts=_narrow(contexts[order]),
        table_rows=_narrow(plan.table_rows.numpy()[order]),
        sample_at=samples,
    )


def _rows(values: Tensor, num_rows: int, padding: int) -> Tensor:
    padded = values.new_full((num_rows,), padding)
    padded[: len(values)] = values
    return padded


def _narrow(values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
