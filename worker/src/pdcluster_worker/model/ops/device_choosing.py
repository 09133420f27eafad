"""Tokens chosen on the device that holds the logits: of a row its token and status alone come to
the host.

Rows that are neither cut by top_k nor by top_p take a kernel's few passes over their
logits; the others go by plain tensor operations, a slab at a time.  All give the
bits of `model.sampling.picking`.  Has never run on a GPU.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdcluster_worker.model.ops.triton_kernels import NO_FUSION, sampling
from pdcluster_worker.model.sampling.logprobs import rank_tokens
from pdcluster_worker.model.sampling.picking import Picks, pick_cut
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import Choosing
from pdcluster_worker.model.sampling.slabs import DEVICE_SLAB, ORDERED_ELEMENTS

BLOCK = 4096
"""Tokens that a program of the kernel looks at together: 8 for each of its threads."""
WARPS = 16


def receive(logits: Tensor) -> Tensor:
    """The logits themselves, once they are computed."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return logits


def pick_on_device(logits: Tensor, rows: Rows) -> Picks:
    """See `model.sampling.picking.pick_tokens`."""
    assert logits.is_contiguous(), "the kernel finds a row by the size of the vocabulary"
    # The kernel leaves the greedy token of a row that is cut, and whether it has one.
    inverse_temperature = np.where(rows.is_cut, 0.0, rows.inverse_temperature)
    settings = np.stack((inverse_temperature, rows.min_p, rows.u), axis=1)
    found = torch.empty(len(rows), 2, dtype=torch.int64, device=logits.device)
    sampling.pick[(len(rows),)](
        logits,
        torch.from_numpy(settings).to(logits.device),
        found,
        vocab_size=logits.shape[1],
        block=BLOCK,
        num_warps=WARPS,
        **NO_FUSION,
    )
    token_ids, status = np.ascontiguousarray(found.cpu().numpy().T)
    picks = Picks(token_ids, status)
    pick_cut(logits, rows, picks, DEVICE_SLAB, ORDERED_ELEMENTS)
    return picks


DEVICE_CHOOSING = Choosing(pick_on_device, partial(rank_tokens, slab=DEVICE_SLAB), receive)
