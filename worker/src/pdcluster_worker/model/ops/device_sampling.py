"""Tokens chosen on the device that holds the logits: of a row its token and status alone come to
the host.

A kernel gives the bits of `model.sampling.picking`; settings and tokens pass through pinned memory,
and the host waits once.  Log probabilities are by plain tensor operations, a slab of rows at a
time.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdcluster_worker.model.ops.triton_kernels import NO_FUSION, sampling
from pdcluster_worker.model.sampling.logprobs import rank_tokens
from pdcluster_worker.model.sampling.picking import Picks, pick_tokens
from pdcluster_worker.model.sampling.row_chunks import DEVICE_CHUNK
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import RowOperations

BLOCK = 4096
"""Tokens that a program of the kernel looks at together: 8 for each of its threads."""
WARPS = 16


def receive(logits: Tensor) -> Tensor:
    """The logits themselves, once they are computed."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return logits


def pick_on_device(logits: Tensor, rows: Rows) -> Picks:
    """See `model.sampling.picking.pick_tokens`, which a small vocabulary goes by: Triton 3.6 fails
    to compile the kernel for rows of one block.
    """
    if logits.shape[1] <= BLOCK:
        return pick_tokens(logits, rows)
    assert logits.is_contiguous(), "the kernel finds a row by the size of the vocabulary"
    columns = (rows.inverse_temperature, rows.top_k, rows.top_p, rows.min_p, rows.u)
    settings = torch.from_numpy(np.stack(columns, axis=1, dtype=np.float64))
    is_cuda = logits.device.type == "cuda"
    if is_cuda:
        settings = settings.pin_memory()
    found = torch.empty(len(rows), 2, dtype=torch.int64, device=logits.device)
    workspaces = torch.empty(len(rows), BLOCK, dtype=torch.float32, device=logits.device)
    sampling.pick[(len(rows),)](
        logits,
        settings.to(logits.device, non_blocking=True),
        found,
        workspaces,
        vocab_size=logits.shape[1],
        block=BLOCK,
        num_warps=WARPS,
        **NO_FUSION,
    )
    # of a GPU: into pinned memory, which torch keeps for the next call
    picked = found.to("cpu", non_blocking=True)
    if is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    token_ids, status = np.ascontiguousarray(picked.numpy().T)
    return Picks(token_ids, status)


DEVICE_ROW_OPS = RowOperations(pick_on_device, partial(rank_tokens, chunk=DEVICE_CHUNK), receive)
