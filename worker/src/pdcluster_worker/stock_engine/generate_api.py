"""Requests for vLLM's token API (`POST /inference/v1/generate`), with all sampling explicit."""

from typing import Any

import msgspec

from pdcluster_worker.messages.requests import (
    Constraint,
    RequestSpec,
    SamplingParams,
)

PATH = "/inference/v1/generate"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

# same name and meaning in vLLM and SGLang, with their neutral values
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


def generate(
    spec: RequestSpec, model: str, *, attempt: int, transfer: dict[str, Any] | None = None
) -> bytes:
    """Streaming request.  transfer: KV to fetch."""
    params, fields = _sampling_params(spec), dict[str, Any]()
    constraint = spec.sampling.constraint
    if constraint is not None and constraint.kind == "rendered":
        fields = _decode(constraint.text)
        params |= fields.pop("sampling_params")
    elif constraint is not None:
        params["structured_outputs"] = structured(constraint)
        fields["reasoning_ended"] = True  # the form holds from the first token
    return _body(
        *(spec, model, attempt, transfer),
        sampling_params=params,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )


def prefill(spec: RequestSpec, model: str, *, attempt: int) -> bytes:
    """Request whose KV vLLM keeps for a peer; its token is ignored."""
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    return prompt_only(spec, model, attempt=attempt, transfer=transfer)


def prompt_only(
    spec: RequestSpec, model: str, *, attempt: int = 1, transfer: dict[str, Any] | None = None
) -> bytes:
    """Request for a prompt's log probabilities, which a stream does not have."""
    params: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    if spec.sampling.prompt_logprobs is not None and not spec.output:
        params["prompt_logprobs"] = spec.sampling.prompt_logprobs
    return _body(spec, model, attempt, transfer, sampling_params=params)


def _body(
    spec: RequestSpec, model: str, attempt: int, transfer: dict[str, Any] | None, **fields: Any
) -> bytes:
    if spec.cache_salt:
        fields["cache_salt"] = spec.cache_salt.hex()
    if transfer is not None:
        fields["kv_transfer_params"] = transfer
    if spec.images:
        fields["content_parts"] = [{"type": "image_url", "url": each.url} for each in spec.images]
        fields["return_token_ids"] = True
    return _encode(
        {
            "model": spec.adapter or model,
            "request_id": f"{spec.request_id}-{attempt}",
            "token_ids": [*_to_widen(spec), *spec.output],
            "priority": spec.priority,
            **fields,
        }
    )


def _to_widen(spec: RequestSpec) -> list[int]:
    """The prompt with one token in the place of each image, which vLLM widens by itself."""
    tokens, end = list[int](), 0
    for image in spec.images:
        tokens += spec.prompt[end : image.offset + 1]
        end = image.offset + image.length
    return [*tokens, *spec.prompt[end:]]


def _sampling_params(spec: RequestSpec) -> dict[str, Any]:
    """Sampling of the tokens that are left to generate."""
    sampling = spec.sampling
    num_made = len(spec.output)
    params = given_sampling(sampling) | {
        "max_tokens": sampling.max_tokens - num_made,
        "stop_token_ids": ends(sampling),
        "ignore_eos": True,
        "detokenize": False,
    }
    if sampling.temperature > 0:
        params["seed"] = sampling.seed
    if sampling.min_tokens:
        params["min_tokens"] = max(0, sampling.min_tokens - num_made)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        # One more than requested: the sampled token takes the place of the last one.
        params["logprobs"] = sampling.logprobs + 1 if sampling.logprobs else 0
    return params


def given_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Settings that are not neutral, under the names that stock engines share with us."""
    return {
        name: value
        for name, neutral in _NEUTRAL.items()
        if (value := getattr(sampling, name)) != neutral
    }


def ends(sampling: SamplingParams) -> list[int]:
    """Tokens at which an answer ends."""
    eos = [] if sampling.ignore_eos else sampling.eos_token_ids
    return list(dict.fromkeys([*sampling.stop_token_ids, *eos]))


def structured(constraint: Constraint) -> dict[str, Any]:
    """vLLM's `structured_outputs`."""
    known = {
        "json_schema": ("json", constraint.text),
        "json_object": ("json_object", True),
    }
    name, value = known.get(constraint.kind, (constraint.kind, constraint.text))
    return {name: _decode(constraint.text) if name == "choice" else value}
