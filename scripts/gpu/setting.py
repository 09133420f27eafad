"""The device of a part, its clock, and the file of its figures."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

REHEARSES = not torch.cuda.is_available()
"""Tiny sizes on a CPU: the code runs, and no figure means anything."""

if REHEARSES:
    from tests.worker.model.ops.interpreter import widen_dots

    widen_dots()

DEVICE = torch.device("cpu" if REHEARSES else "cuda")
PACK = Path(os.environ.get("PDCLUSTER_GPU_PACK", ".gpu"))
"""See `make gpu-pack`."""
SITE = Path(os.environ.get("PDCLUSTER_GPU_SITE", ".gpu"))
"""Folder with the unpacked wheels and libraries of the pack."""


def synchronize() -> None:
    """Wait for the device."""
    if not REHEARSES:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 20, warm_ups: int = 3) -> float:
    """The median of `repeats`, by the device's clock."""
    if REHEARSES:
        return _on_the_host(work)
    for _ in range(warm_ups):
        work()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def _on_the_host(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def save(figures: dict[str, Any]) -> None:
    """Write the figures so far to the file of this part, which its arguments name."""
    Path(sys.argv[1]).write_text(json.dumps(figures))


def ceilings() -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and operations per second of a product in
    bfloat16.
    """
    size = 1 << 20 if REHEARSES else 1 << 31
    side = 64 if REHEARSES else 8192
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return (
        2 * size / seconds(lambda: target.copy_(source)),
        2 * side**3 / seconds(lambda: a @ b),
    )
