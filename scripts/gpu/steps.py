"""Times of steps beside the roofline: layers of the `cuda` operations over random weights.

A decode step must read the weights and the keys and values once; a prefill must
multiply.  Both are compared with what this device reaches at a plain copy and a
plain product, measured in the same run.
"""

import sys
from typing import Any

import torch
from setting import REHEARSES, ceilings, save, seconds
from stack import (
    DECODES,
    LARGE,
    PROMPTS,
    SMALL,
    Opened,
    decode_bytes,
    open_stack,
    plan_of,
    prefill_operations,
)


@torch.inference_mode()
def main() -> int:
    """Print a line for each step."""
    bandwidth, peak = ceilings()
    figures: dict[str, Any] = {"copy TB/s": bandwidth / 1e12, "product TFLOP/s": peak / 1e12}
    print(figures, flush=True)
    for model in (LARGE, SMALL):
        opened = open_stack(model)
        for batch, context in DECODES:
            found = decode(opened, batch, context)
            floor = decode_bytes(model, batch, context) / bandwidth
            note(figures, f"{model.name} decode {batch} x {context}", found, floor)
        for prompt in PROMPTS:
            found = prefill(opened, prompt)
            floor = prefill_operations(model, prompt) / peak
            note(figures, f"{model.name} prefill {prompt}", found, floor)
        del opened
        if not REHEARSES:
            torch.cuda.empty_cache()
    return 0


def note(figures: dict[str, Any], name: str, found: dict[str, float], floor: float) -> None:
    """One step: all times in ms, and the share of the floor that the fastest way reaches."""
    best = found.get("graph", found["eager"])
    figures[name] = {key: took * 1e3 for key, took in found.items()}
    figures[name] |= {"floor": floor * 1e3, "share": floor / best}
    print(name, {key: round(value, 3) for key, value in figures[name].items()}, flush=True)
    save(figures)


def decode(opened: Opened, batch: int, context: int) -> dict[str, float]:
    """Seconds of a decode step and of its parts."""
    plan = plan_of([context] * batch, 1)
    placed = opened.copy.place(plan)
    found = {
        "eager": seconds(lambda: opened.stack(opened.copy.place(plan)), 10),
        "products": seconds(lambda: opened.stack.products(placed), 10),
        "attention": seconds(lambda: opened.stack.attention(placed), 10),
    }
    graphs = opened.graphs
    if graphs is not None:
        found["graph"] = seconds(lambda: graphs.logits(plan))
    return found


def prefill(opened: Opened, prompt: int) -> dict[str, float]:
    """Seconds of a prefill and of its parts."""
    plan = plan_of([prompt], prompt)
    opened.operations._attention.begin(plan)
    placed = opened.copy.place(plan)
    return {
        "eager": seconds(lambda: opened.stack(opened.copy.place(plan)), 5),
        "products": seconds(lambda: opened.stack.products(placed), 5),
        "attention": seconds(lambda: opened.stack.attention(placed), 5),
    }


if __name__ == "__main__":
    sys.exit(main())
