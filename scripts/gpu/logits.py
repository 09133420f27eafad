"""Logits of an 8B llama by our decoder beside transformers' on the same device: a prefill, decodes
after it, and the prefill in chunks.
"""

import sys

import torch
from large_model import BLOCK_SIZE, Large, open_large
from setting import DEVICE, REHEARSES, save

from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.step_plan import StepLimits, StepPlanner

PROMPT = 40 if REHEARSES else 300
DECODES = 8
CHUNK = 16 if REHEARSES else 128
MAX_DIFFERENCE = 0.08
"""A share of the logits' size; 8B in bfloat16 by two orders of sums."""


@torch.inference_mode()
def main() -> int:
    """Compare; exits 1 above the bound."""
    large = open_large(num_blocks=64, max_batched_tokens=512, max_sequences=4, keep_module=True)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 500, (PROMPT + DECODES,), generator=generator).tolist()
    expected = large.module(torch.tensor([ids], device=DEVICE)).logits[0, PROMPT - 1 :].float()
    whole = torch.stack(ours(large, ids, PROMPT))
    chunked = torch.stack(ours(large, ids, CHUNK))
    figures = {
        "prefill": difference(whole[0], expected[0]),
        "decodes": max(map(difference, whole[1:], expected[1:])),
        "chunked": max(map(difference, chunked, expected)),
        "chunked beside whole": max(map(difference, chunked, whole)),
        "same best token": int((whole.argmax(1) == expected.argmax(1)).sum()),
        "of": len(expected),
    }
    print(figures, flush=True)
    save(figures)
    parts = [figures[name] for name in ("prefill", "decodes", "chunked")]
    return 0 if all(part <= MAX_DIFFERENCE for part in parts) else 1


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return it as a share of the expected logits' size; NaN where either is not finite."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def ours(large: Large, ids: list[int], chunk: int) -> list[torch.Tensor]:
    """Logits after the prompt and after each token that follows it."""
    planner = StepPlanner(StepLimits(512, 4, longest=1024 * BLOCK_SIZE, block_size=BLOCK_SIZE))
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    request = EngineRequest(
        "one",
        ids[:PROMPT],
        PROMPT,
        SamplingParams(max_tokens=DECODES + 1, seed=0),
        block_table=blocks,
    )
    found = []
    for length in (PROMPT, *range(PROMPT + 1, len(ids) + 1)):
        request.tokens[:] = ids[:length]
        while request.num_computed_tokens < length:
            count = min(chunk, length - request.num_computed_tokens)
            batch = Batch((Scheduled.of(request, count),))
            logits = large.decoder.logits(planner.plan(batch))
            request.num_computed_tokens += count
        found.append(logits[0].clone())
    return found


if __name__ == "__main__":
    sys.exit(main())
