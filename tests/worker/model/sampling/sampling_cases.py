"""Requests, logits and a naive reading of the sampling rules, for the tests of the
sampler's parts.
"""

import math

import numpy as np
import torch

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.model.sampling.picking import QUANTUM, token_weights
from pdcluster_worker.model.sampling.rows import plan_rows


def make_request(tokens=(1, 2), num_prompt=None, name="r", **sampling):
    options = {"max_tokens": 100, "seed": 0, "temperature": 0.0, **sampling}
    count = len(tokens) if num_prompt is None else num_prompt
    return EngineRequest(name, list(tokens), count, SamplingParams(**options))


def random_logits(seed, num_rows, vocab_size, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def rows_for(vocab_size, *samplings):
    """Rows of requests."""
    requests = [make_request(**sampling) for sampling in samplings]
    return plan_rows(requests, vocab_size)


def weights_of(logits, temperature=1.0, min_p=0.0):
    """Weights of one row, as the sampler has them, as a list."""
    row = logits.view(1, -1)
    inverse = torch.tensor([1 / temperature], dtype=torch.float32)
    weights = token_weights(row, row.amax(1), inverse)[0].tolist()
    return [weight if weight >= np.float32(min_p) else 0.0 for weight in weights]


def naive_kept(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Token id -> weight of all that may be drawn, one token after the other."""
    weights = weights_of(logits, temperature, min_p)
    order = sorted(range(len(weights)), key=lambda n: (-float(logits[n]), n))
    order = order[: top_k or len(order)]
    needed, mass, kept = top_p * math.fsum(weights[n] for n in order), 0.0, {}
    for token_id in order:
        if top_p < 1 and mass >= needed:
            break
        kept[token_id] = weights[token_id]
        mass += weights[token_id]
    return {token_id: weight for token_id, weight in kept.items() if weight > 0}


def naive_pick(logits, u, **sampling):
    """The token that a draw at `u` gives."""
    if sampling.get("temperature", 1.0) == 0 or sampling.get("top_k") == 1:
        return max(range(len(logits)), key=lambda n: (float(logits[n]), -n))
    kept = sorted(naive_kept(logits, **sampling).items())
    total = math.fsum(weight for _, weight in kept)
    share, mass = min(u * total, total - QUANTUM), 0.0
    for token_id, weight in kept:
        mass += weight
        if mass > share:
            return token_id
    raise AssertionError("no token at the share")
