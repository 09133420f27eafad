"""Tokens chosen on this device beside the host's choice from the same logits, and the times of
both ways.
"""

import sys
from typing import Any

import numpy as np
import torch
from setting import DEVICE, REHEARSES, save, seconds

from pdcluster_worker.model.ops.cuda import DEVICE_ROW_OPS
from pdcluster_worker.model.sampling.picking import pick_tokens
from pdcluster_worker.model.sampling.rows import Rows

VOCAB_SIZE = 500 if REHEARSES else 151_936
BATCHES = (1, 2) if REHEARSES else (1, 16, 128)
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature 1": (1.0, 0, 1.0, 0.0),
    "temperature 0.7, min_p 0.05": (0.7, 0, 1.0, 0.05),
    "temperature 1, top_p 0.9": (1.0, 0, 0.9, 0.0),
    "temperature 0.7, top_k 20, top_p 0.8": (0.7, 20, 0.8, 0.0),
}
"""Temperature, top_k, top_p and min_p."""


def rows_of(count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Rows:
    """Rows of these settings, each with a draw of its own."""
    return Rows(
        np.full(count, 1 / temperature if temperature else 0.0, dtype=np.float32),
        np.full(count, top_k, dtype=np.int64),
        np.full(count, top_p, dtype=np.float64),
        np.full(count, min_p, dtype=np.float32),
        np.random.default_rng(count).random(count),
    )


@torch.inference_mode()
def main() -> int:
    """Exits 1 where a token is not the host's."""
    figures: dict[str, Any] = {}
    for count in BATCHES:
        logits = torch.randn(count, VOCAB_SIZE, device=DEVICE) * 3
        copy = seconds(lambda logits=logits: logits.cpu())
        figures[f"{count} logits to the host"] = {"ms": copy * 1e3}
        for name, settings in SETTINGS.items():
            rows = rows_of(count, *settings)
            found, expected = DEVICE_ROW_OPS.pick(logits, rows), pick_tokens(logits.cpu(), rows)
            equal = found.token_ids.tolist() == expected.token_ids.tolist()
            took = seconds(lambda logits=logits, rows=rows: DEVICE_ROW_OPS.pick(logits, rows))
            figures[f"{count}, {name}"] = {"ms": took * 1e3, "equal": equal}
    for name, figure in figures.items():
        print(name, figure, flush=True)
    save(figures)
    return 0 if all(figure.get("equal", True) for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
