"""From a checked request body to the engine's RequestSpecs: defaults, and the limits that depend on
the model.  Raises RequestError naming the field and the limit.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import ContextLengthError, RequestError, field_error
from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams
from pdcluster_worker.server.schemas.requests import Extension, Generate

_SEEDS = 2**63
MAX_PROMPT_FIGURES = 1 << 21
"""Log probabilities of prompts in one answer, which is made in one go."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """max_model_len: prompt and output tokens.  length_note: why it is no more."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    length_note: str = ""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """default_max_tokens: without max_tokens, cut to what the context leaves; None = all of it."""

    max_tokens: int | None
    max_tokens_param: str
    default_max_tokens: int | None
    prompt_param: str
    logprobs: int | None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


def specs_for(
    request: Generate,
    sampling_request: SamplingRequest,
    prompts: Sequence[list[int]],
    limits: ModelLimits,
    *,
    response_id: str,
    priority: int = 0,
    cache_salt: bytes = b"",
    tenant: str = "",
    prefiller: str = "",
) -> list[list[RequestSpec]]:
    """One list of n choices for each prompt; choice i (over all prompts) samples with seed + i."""
    _check_relations(request)
    n, extension = request.n or 1, request.pdcluster or Extension()
    _check_figures(request, sampling_request, n * sum(map(len, prompts)))
    seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    specs = []
    for position, prompt in enumerate(prompts):
        max_tokens = _max_tokens(sampling_request, prompt, limits)
        choices = range(position * n, (position + 1) * n)
        specs.append(
            [
                RequestSpec(
                    request_id=f"{response_id}-{i}",
                    prompt=prompt,
                    sampling=_sampling(
                        request,
                        sampling_request,
                        max_tokens,
                        seed + i,
                        limits,
                        # The prompt's other choices find it in the cache; those of a stream may
                        # begin before the first one.
                        prompt_logprobs=sampling_request.prompt_logprobs
                        if i == choices[0] or request.stream
                        else None,
                    ),
                    priority=priority,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    # likewise: those that follow find the prompt in the cache
                    prefiller=prefiller if i == choices[0] else "",
                    ttft_slo_seconds=_seconds(extension.ttft_slo_ms),
                    tpot_slo_seconds=_seconds(extension.tpot_slo_ms),
                    deadline_seconds=_seconds(extension.deadline_ms),
                )
                for i in choices
            ]
        )
    return specs


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


def _max_tokens(sampling_request: SamplingRequest, prompt: list[int], limits: ModelLimits) -> int:
    num_prompt, most = len(prompt), limits.max_model_len
    space = most - num_prompt
    name = sampling_request.prompt_param
    if space < 1:
        cause = f"your {name} resulted in {num_prompt} tokens"
        fix = f"shorten {name} to at most {most - 1}"
        raise ContextLengthError(
            _too_long(limits, cause, fix),
            param=name,
            num_prompt=num_prompt,
            max_tokens=None,
            most=most,
        )
    if sampling_request.max_tokens is None:
        return (
            space
            if sampling_request.default_max_tokens is None
            else min(sampling_request.default_max_tokens, space)
        )
    if sampling_request.max_tokens > space:
        num_tokens = num_prompt + sampling_request.max_tokens
        parts = f"{num_prompt} in the {name}, {sampling_request.max_tokens} in the completion"
        cause = f"you requested {num_tokens} tokens ({parts})"
        fix = f"{sampling_request.max_tokens_param} can be at most {space}"
        raise ContextLengthError(
            _too_long(limits, cause, fix),
            param=sampling_request.max_tokens_param,
            num_prompt=num_prompt,
            max_tokens=sampling_request.max_tokens,
            most=most,
        )
    return sampling_request.max_tokens


def _too_long(limits: ModelLimits, cause: str, fix: str) -> str:
    most = limits.max_model_len
    note = f" ({limits.length_note})" if limits.length_note else ""
    return f"This model's maximum context length is {most} tokens. However, {cause}: {fix}{note}."


def _sampling(
    request: Generate,
    sampling_request: SamplingRequest,
    max_tokens: int,
    seed: int,
    limits: ModelLimits,
    *,
    prompt_logprobs: int | None,
) -> SamplingParams:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise field_error(
            "min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that may be generated"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed % _SEEDS,
        temperature=_temperature(request),
        top_p=request.top_p or 1.0,
        top_k=min(max(request.top_k or 0, 0), limits.vocab_size),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0
        if request.repetition_penalty is None
        else request.repetition_penalty,
        logit_bias=_logit_bias(request, limits),
        logprobs=sampling_request.logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=_in_vocabulary("stop_token_ids", request.stop_token_ids or [], limits),
        eos_token_ids=limits.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
        constraint=sampling_request.constraint,
    )


def _temperature(request: Generate) -> float:
    if request.top_p == 0:
        return 0.0  # a nucleus of nothing but the most likely token
    return 1.0 if request.temperature is None else request.temperature


def _logit_bias(request: Generate, limits: ModelLimits) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (
            key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < limits.vocab_size
        ):
            raise field_error(
                "logit_bias",
                f"keys must be token ids from 0 to {limits.vocab_size - 1}, not {quoted(key)}",
            )
        bias[int(key)] = value
    return bias


def check_token_ids(param: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises RequestError when an id is not of the vocabulary."""
    wrong = next(
        (token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size), None
    )
    if wrong is not None:
        raise field_error(
            param, f"token ids must be from 0 to {limits.vocab_size - 1}, not {wrong}"
        )


def _in_vocabulary(param: str, token_ids: list[int], limits: ModelLimits) -> list[int]:
    check_token_ids(param, token_ids, limits)
    return token_ids


def _check_figures(
    request: Generate, sampling_request: SamplingRequest, num_positions: int
) -> None:
    num_figures = (
        0
        if sampling_request.prompt_logprobs is None
        else num_positions * (sampling_request.prompt_logprobs + 1)
    )
    if num_figures > MAX_PROMPT_FIGURES:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        message = (
            f"{param}: of these prompts and n they are {num_figures} figures, more than "
            f"{MAX_PROMPT_FIGURES}: ask for fewer at once"
        )
        raise RequestError(message, param=param)


def _check_relations(request: Generate) -> None:
    if request.stream_options is not None and not request.stream:
        raise field_error("stream_options", "is allowed only with stream=true: leave it out")
    if request.stream and request.prompt_logprobs is not None:
        message = (
            "prompt_logprobs: is not available with stream=true: leave either out, or use echo "
            "with logprobs"
        )
        raise RequestError(message, param="prompt_logprobs")
