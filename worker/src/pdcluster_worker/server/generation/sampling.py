"""From a checked body to the engine's RequestSpecs: defaults, and limits of the model."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import ContextLengthError, field_error
from pdcluster_worker.messages.requests import Constraint, Image, RequestSpec, SamplingParams
from pdcluster_worker.server.schemas.requests import Extension, Generate

_SEEDS = 2**63
MAX_PROMPT_FIGURES = 1 << 21
"""Log probabilities of prompts in one answer, which is made in one go."""

_MOST_IDS = 2**31 - 1  # engines hold a token id in 32 bits


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """max_model_len: prompt and output tokens.  vocab_size: 0 = not known, where the engine itself
    refuses an id beyond it.  length_note: why max_model_len is no more.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    length_note: str = ""

    @property
    def num_ids(self) -> int:
        return self.vocab_size or _MOST_IDS


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
    adapter: str = "",
    adapter_weights: str = "",
    tenant: str = "",
    prefiller: str = "",
    images: Sequence[Image] = (),
) -> list[list[RequestSpec]]:
    """One list of n choices for each prompt; choice i (over all prompts) samples with seed + i."""
    n, extension = request.n or 1, request.pdcluster or Extension()
    _check_relations(request, sampling_request, n * sum(map(len, prompts)))
    seed = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
    specs = []
    for position, prompt in enumerate(prompts):
        sampling = _sampling(request, sampling_request, prompt, limits)
        choices = range(position * n, (position + 1) * n)
        specs.append(
            [
                RequestSpec(
                    request_id=f"{response_id}-{i}",
                    prompt=prompt,
                    sampling=replace(
                        sampling,
                        seed=(seed + i) % _SEEDS,
                        # The prompt's other choices find it in the cache; those of a stream may
                        # begin before the first one.
                        prompt_logprobs=sampling.prompt_logprobs
                        if i == choices[0] or request.stream
                        else None,
                    ),
                    priority=priority,
                    adapter=adapter,
                    adapter_weights=adapter_weights,
                    cache_salt=cache_salt,
                    tenant=tenant,
                    images=list(images),
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


def _max_tokens(request: SamplingRequest, prompt: list[int], limits: ModelLimits) -> int:
    num_prompt, most = len(prompt), limits.max_model_len
    name, max_tokens, space = request.prompt_param, request.max_tokens, most - num_prompt
    if space < 1:
        param, max_tokens = name, None
        cause = f"your {name} resulted in {num_prompt} tokens"
        fix = f"shorten {name} to at most {most - 1}"
    elif max_tokens is None:
        most_default = request.default_max_tokens
        return space if most_default is None else min(most_default, space)
    elif max_tokens > space:
        param = request.max_tokens_param
        parts = f"{num_prompt} in the {name}, {max_tokens} in the completion"
        cause = f"you requested {num_prompt + max_tokens} tokens ({parts})"
        fix = f"{param} can be at most {space}"
    else:
        return max_tokens
    note = f" ({limits.length_note})" if limits.length_note else ""
    message = (
        f"This model's maximum context length is {most} tokens. However, {cause}: {fix}{note}."
    )
    raise ContextLengthError(
        message, param=param, num_prompt=num_prompt, max_tokens=max_tokens, most=most
    )


def _sampling(
    request: Generate, sampling_request: SamplingRequest, prompt: list[int], limits: ModelLimits
) -> SamplingParams:
    max_tokens = _max_tokens(sampling_request, prompt, limits)
    min_tokens, penalty = request.min_tokens or 0, request.repetition_penalty
    if min_tokens > max_tokens:
        raise field_error(
            "min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that may be generated"
        )
    stop_token_ids = request.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, limits)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=0,
        temperature=_temperature(request),
        top_p=request.top_p or 1.0,
        top_k=min(max(request.top_k or 0, 0), limits.num_ids),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        logit_bias=_logit_bias(request, limits),
        logprobs=sampling_request.logprobs,
        prompt_logprobs=sampling_request.prompt_logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
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
        is_id = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_id or int(key) >= limits.num_ids:
            raise field_error(
                "logit_bias",
                f"keys must be token ids from 0 to {limits.num_ids - 1}, not {quoted(key)}",
            )
        bias[int(key)] = value
    return bias


def check_token_ids(param: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises RequestError when an id is not of the vocabulary."""
    size = limits.num_ids
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
    if wrong is not None:
        raise field_error(param, f"token ids must be from 0 to {size - 1}, not {wrong}")


def _check_relations(request: Generate, sampling_request: SamplingRequest, num_tokens: int) -> None:
    """num_tokens: of all choices' prompts."""
    if request.stream_options is not None and not request.stream:
        raise field_error("stream_options", "is allowed only with stream=true: leave it out")
    if request.stream and request.prompt_logprobs is not None:
        raise field_error(
            "prompt_logprobs",
            "is not available with stream=true: leave either out, or use echo with logprobs",
        )
    count = sampling_request.prompt_logprobs
    num_figures = 0 if count is None else num_tokens * (count + 1)
    if num_figures > MAX_PROMPT_FIGURES:
        raise field_error(
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            f"of these prompts and n they are {num_figures} figures, more than "
            f"{MAX_PROMPT_FIGURES}: ask for fewer at once",
        )
