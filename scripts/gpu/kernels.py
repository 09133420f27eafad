"""The kernels that take longest in three decode steps of 64 and in one prefill, by torch's
profiler.
"""

import sys
from typing import Any

import torch
from setting import REHEARSES, save, synchronize
from stack import LARGE, PROMPTS, open_stack, plan_of
from torch.profiler import ProfilerActivity, profile

BATCH, CONTEXT, STEPS = (2, 40, 1) if REHEARSES else (64, 1024, 3)


@torch.inference_mode()
def main() -> int:
    """Print the ten longest of each."""
    opened = open_stack(LARGE)
    figures: dict[str, Any] = {}
    for name, plan, steps in (
        (f"decode {BATCH} x {CONTEXT}", plan_of([CONTEXT] * BATCH, 1), STEPS),
        (f"prefill {PROMPTS[0]}", plan_of([PROMPTS[0]], PROMPTS[0]), 1),
    ):
        step = opened.stack if opened.graphs is None else opened.graphs.logits
        placed = opened.copy.place(plan) if opened.graphs is None else plan
        step(placed)
        synchronize()
        activities = [ProfilerActivity.CPU, *([] if REHEARSES else [ProfilerActivity.CUDA])]
        with profile(activities=activities) as profiled:
            for _ in range(steps):
                step(placed)
            synchronize()
        kernels = [
            (event.key[:90], event.count, round(event.self_device_time_total / steps / 1e3, 4))
            for event in profiled.key_averages()
        ]
        longest = sorted(kernels, key=lambda kernel: -kernel[2])[:10]
        figures[name] = {"ms": round(sum(kernel[2] for kernel in kernels), 3), "longest": longest}
        print(name, figures[name], flush=True)
        save(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
