"""Collectives of the ranks: gloo over loopback on CPUs, NCCL on GPUs.

If a rank dies, every call of the others raises EngineBrokenError at once: its sockets close.
"""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from pdcluster_schema.text import one_line
from pdcluster_worker.engine.ports import EngineBrokenError
from pdcluster_worker.model.ops.operations import Group
from pdcluster_worker.model.rank_layout import ParallelRank

_distributed: Any = distributed  # its classes have few types

LOOPBACK = "127.0.0.1"
# longer than any load or step; a dead rank is noticed by its sockets
TIMEOUT = timedelta(minutes=10)


class RankGroup(Group):
    """One rank's connections."""

    def __init__(self, place: ParallelRank, store_path: Path, device: torch.device) -> None:
        """Waits for every rank of the engine.  store_path: rendezvous file."""
        self.is_first, self.is_last = place.is_first, place.is_last
        self._place = place
        store = _distributed.FileStore(str(store_path), place.num_ranks)
        with _broken_by_a_rank():
            stage_store = _distributed.PrefixStore(f"stage {place.stage}", store)
            self._stage = _connect(stage_store, place.part, place.tensor_size, device)
            whole = _distributed.PrefixStore("whole", store)
            self._whole = (
                _connect(whole, place.rank, place.num_ranks, device)
                if place.pipeline_size > 1
                else None
            )

    def reduce(self, x: Tensor) -> Tensor:
        """In place."""
        if self._place.tensor_size > 1:
            with _broken_by_a_rank():
                self._stage.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        size = self._place.tensor_size
        if size == 1:
            return x
        if not len(x):
            return x.new_empty(0, size * x.shape[1])
        parts = [torch.empty_like(x) for _ in range(size)]
        with _broken_by_a_rank():
            self._stage.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=1)

    def receive(self, like: Tensor) -> Tensor:
        assert self._whole is not None, "one stage has no neighbour"
        with _broken_by_a_rank():
            self._whole.recv([like], self._place.rank - self._place.tensor_size, 0).wait()
        return like

    def send(self, hidden: Tensor) -> None:
        self._send(hidden, self._place.rank + self._place.tensor_size)

    def expect_logits(self, into: Tensor) -> Any:
        """Rank 0: start to receive the last stage's logits; returns the argument of `wait`."""
        assert self._whole is not None, "one stage has its own logits"
        with _broken_by_a_rank():
            return self._whole.recv([into], self._place.num_ranks - self._place.tensor_size, 0)

    def wait(self, work: Any) -> None:
        with _broken_by_a_rank():
            work.wait()

    def answer_logits(self, logits: Tensor) -> None:
        """First rank of the last stage: send its logits to rank 0."""
        if self._place.part == 0:
            self._send(logits, 0)

    def close(self) -> None:
        for group in (self._stage, self._whole):
            if group is not None:
                group.shutdown()

    def _send(self, rows: Tensor, rank: int) -> None:
        assert self._whole is not None, "one stage has no neighbour"
        with _broken_by_a_rank():
            self._whole.send([rows], rank, 0).wait()


def rank_device(kind: str, rank: int) -> torch.device:
    """kind: cpu or cuda; of cuda the rank's GPU becomes the process's default."""
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _connect(store: Any, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        return _distributed.ProcessGroupNCCL(store, rank, size, timeout=TIMEOUT)
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    return _distributed.ProcessGroupGloo(store, rank, size, options)


@contextlib.contextmanager
def _broken_by_a_rank() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:
        raise EngineBrokenError(f"a rank of this engine is gone: {one_line(e)}") from e
