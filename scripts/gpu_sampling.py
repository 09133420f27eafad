"""Tokens chosen on this GPU beside the host's choice from the same logits, and the times of both
ways: chosen where the logits are, and copied to the host before any choice.
"""

import numpy as np
import torch
from gpu_figures import seconds

from pdcluster_worker.model.ops.device_choosing import DEVICE_CHOOSING
from pdcluster_worker.model.sampling.picking import pick_tokens
from pdcluster_worker.model.sampling.rows import Rows

VOCAB_SIZE = 151_936
BATCHES = (1, 16, 128)
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
def report() -> bool:
    """Print a line for each batch and its settings; returns whether all tokens are the host's."""
    agree = True
    for count in BATCHES:
        generator = torch.Generator("cuda").manual_seed(count)
        logits = torch.randn(count, VOCAB_SIZE, device="cuda", generator=generator) * 3
        copy = seconds(lambda logits=logits: logits.cpu())
        print(f"logits of {count} x {VOCAB_SIZE} to the host: {copy * 1e3:.3f} ms", flush=True)
        for name, settings in SETTINGS.items():
            rows = rows_of(count, *settings)
            found, wanted = DEVICE_CHOOSING.pick(logits, rows), pick_tokens(logits.cpu(), rows)
            is_equal = found.token_ids.tolist() == wanted.token_ids.tolist()
            agree &= is_equal
            took = seconds(lambda logits=logits, rows=rows: DEVICE_CHOOSING.pick(logits, rows))
            print(
                f"tokens of {count} x {VOCAB_SIZE}, {name}: {took * 1e3:.3f} ms, "
                f"{'equal' if is_equal else 'NOT equal'} to the host's",
                flush=True,
            )
    return agree
