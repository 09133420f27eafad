"""Sampling with every setting that changes a draw."""

import msgspec

from pdcluster_worker.messages.requests import SamplingParams

SAMPLING = SamplingParams(
    max_tokens=20,
    seed=1234,
    temperature=0.9,
    top_p=0.95,
    top_k=50,
    min_p=0.001,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logprobs=3,
    ignore_eos=True,
)


SAMPLED = msgspec.to_builtins(SAMPLING)
"""The same as fields of an API request: their names are alike."""
