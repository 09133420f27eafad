"""Checks of what another worker sent: a value that no worker of ours would send raises ValueError,
which names the field.

Limits of the model (vocabulary, context) are the engine's.
"""

import re
from collections.abc import Iterable
from math import isfinite

from pdcluster_worker.messages.constraint import MAX_CONSTRAINT_CHARACTERS
from pdcluster_worker.messages.requests import SALT_BYTES, RequestSpec, SamplingParams, Token

SAMPLING_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
SAMPLING_LISTS = ("stop_token_ids", "eos_token_ids")
_SAMPLING_NATURALS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "top_k",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
)
_INTEGERS = 1 << 31
_LOSS = re.compile("[!-+.-~-]{1,64}")  # no space and no comma, which part them
_MAX_LOSSES = 8


def checked_request(spec: RequestSpec) -> RequestSpec:
    """A request that a peer sent.

    Raises ValueError for an empty id or prompt, negative token ids, impossible sampling, a salt of
    another length and an objective that is no time.
    """
    require(bool(spec.request_id), "request_id is empty")
    require(len(spec.prompt) > 0, "prompt is empty")
    require_natural("prompt", spec.prompt)
    require_natural("output", spec.output)
    num_salt = len(spec.cache_salt)
    require(
        num_salt in (0, SALT_BYTES), f"cache_salt has {num_salt} bytes, not {SALT_BYTES} or none"
    )
    require(abs(spec.priority) <= 1 << 31, "priority is not of 32 bits")
    for name in ("ttft_slo_seconds", "tpot_slo_seconds", "deadline_seconds"):
        seconds = getattr(spec, name)
        require(seconds is None or (isfinite(seconds) and seconds > 0), f"{name} is not a time")
    _check_sampling(spec.sampling)
    return spec


def _check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError for what no ingress admits."""
    for name in SAMPLING_REALS:
        require(isfinite(getattr(sampling, name)), f"{name} is not a finite number")
    for name in _SAMPLING_NATURALS:
        value = getattr(sampling, name) or 0
        require(value >= 0, f"{name} is negative")
        require(isinstance(value, float) or value < _INTEGERS, f"{name} is over 32 bits")
    require(sampling.max_tokens >= 1, "max_tokens is below 1")
    require(0 <= sampling.seed < 1 << 64, "seed is not of 64 bits")
    require(
        all(isfinite(bias) for bias in sampling.logit_bias.values()),
        "logit_bias is not a finite number",
    )
    for name in ("logit_bias", *SAMPLING_LISTS):
        require_natural(name, getattr(sampling, name))
    if sampling.constraint is not None:
        num_characters = len(sampling.constraint.text)
        require(
            num_characters <= MAX_CONSTRAINT_CHARACTERS,
            f"constraint has {num_characters} characters, over {MAX_CONSTRAINT_CHARACTERS}",
        )


def checked_token(request_id: str, token: Token) -> None:
    """Raise ValueError for a token of another request, and for a negative id."""
    require(token.request_id == request_id, "a token is of another request")
    require(token.token_id >= 0, "token_id is negative")


def losses(values: Iterable[str]) -> tuple[str, ...]:
    """Losses of a request that a peer sent, as far as a header can carry them."""
    return tuple(what for what in values if _LOSS.fullmatch(what))[:_MAX_LOSSES]


def require(fact: bool, otherwise: str) -> None:
    """Raise ValueError where it is no fact."""
    if not fact:
        raise ValueError(otherwise)


def require_natural(name: str, values: Iterable[int]) -> None:
    """Raise ValueError for a number below 0 or of over 32 bits."""
    require(min(values, default=0) >= 0, f"{name} holds a negative number")
    require(max(values, default=0) < _INTEGERS, f"{name} holds a number of over 32 bits")
