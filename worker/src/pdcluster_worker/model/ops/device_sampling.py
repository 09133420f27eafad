"""Sampling on the device: only token and status come to the host, with `picking`'s bits."""

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

BLOCK = 4096  # tokens that a program looks at together: 8 for each thread
WARPS = 16


def receive(logits: Tensor) -> Tensor:
    """Wait until the logits are computed."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return logits


def pick_on_device(logits: Tensor, rows: Rows) -> Picks:
    """`pick_tokens` for a small vocabulary: Triton 3.6 fails to compile rows of one block."""
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
