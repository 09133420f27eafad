"""SGLang's `POST /generate` and `GET /v1/loads`, read as vLLM's answers and numbers are."""

import re
from typing import Any

import msgspec

from pdcluster_schema.stock_versions import unknown_sglang
from pdcluster_worker.messages.requests import Constraint, RequestSpec
from pdcluster_worker.stock_engine.engine_api import EngineApi, restarted_form
from pdcluster_worker.stock_engine.generate_api import ends, given_sampling
from pdcluster_worker.stock_engine.metrics_page import Scrape
from pdcluster_worker.stock_engine.responses import (
    ChoiceBody,
    ChunkBody,
    ErrorBody,
    Logprobs,
    PromptDetails,
    Ranked,
    Scored,
    TopToken,
    UsageBody,
    WholeBody,
)

GENERATE, LOADS = "/generate", "/v1/loads?include=core"

_Entry = tuple[float | None, int, str | None]  # log probability, token, its text

_encode = msgspec.json.Encoder().encode


class _End(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _End | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[_Entry] | None = None
    output_top_logprobs: list[list[_Entry] | None] | None = None
    input_token_logprobs: list[_Entry] = []
    input_top_logprobs: list[list[_Entry] | None] | None = None


class _Answer(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: ErrorBody | None = None


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    loads: list[_Load]


_answer = msgspec.json.Decoder(_Answer).decode
_loads = msgspec.json.Decoder(_Loads).decode


def sglang_api(*, block_size: int, prefix_caching: bool) -> EngineApi:
    """Both as the engine was started, which does not say them."""

    def read_numbers(page: bytes, num_ranks: int) -> list[Scrape]:
        return [
            _scrape(load, block_size, prefix_caching) for load in _loads(page).loads[:num_ranks]
        ]

    return EngineApi(
        kind="sglang",
        name="SGLang",
        unknown_version=unknown_sglang,
        generate_path=GENERATE,
        version_path=LOADS,
        numbers_path=LOADS,
        refusal=refusal,
        generate=generate,
        prompt_only=prompt_only,
        decode_chunk=decode_chunk,
        decode_whole=decode_whole,
        read_numbers=read_numbers,
        longest=_longest,
    )


def _longest(length: int, scrape: Scrape) -> int:
    """SGLang refuses prompts nearer to the least of both, and cuts answers there without notice."""
    return max(1, min(length, scrape.num_blocks * scrape.block_size) - 6)


def refusal(spec: RequestSpec) -> tuple[str, str] | None:
    if spec.sampling.ignore_eos and spec.sampling.stop_token_ids:
        message = (
            "stop_token_ids have no effect beside ignore_eos with engine type sglang: leave one of "
            "them out"
        )
        return message, "stop_token_ids"
    return restarted_form("sglang", spec)


def generate(spec: RequestSpec, model: str, *, attempt: int) -> bytes:
    """Streaming request.  SGLang ends at the model's own ends of a text, too."""
    sampling, num_made = spec.sampling, len(spec.output)
    params = given_sampling(sampling) | {
        "max_new_tokens": sampling.max_tokens - num_made,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": ends(sampling),
    }
    if sampling.min_tokens:
        params["min_new_tokens"] = max(0, params.pop("min_tokens") - num_made)
    if sampling.temperature > 0:
        params["sampling_seed"] = sampling.seed % (1 << 63)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.constraint is not None:
        params |= _form(sampling.constraint)
    scores: dict[str, Any] = {}
    if sampling.logprobs is not None:
        scores = {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    return _body(spec, attempt, params, stream=True, **scores)


def prompt_only(spec: RequestSpec, model: str, *, attempt: int = 1) -> bytes:
    scores: dict[str, Any] = {}
    if spec.sampling.prompt_logprobs is not None:
        num_top = spec.sampling.prompt_logprobs
        scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num_top}
    params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    return _body(spec, attempt, params, **scores)


def decode_chunk(data: bytes) -> ChunkBody:
    """Raises msgspec.DecodeError."""
    answer = _answer(data)
    meta, end = answer.meta_info, answer.meta_info.finish_reason
    if answer.error is not None or (end is not None and end.type == "abort"):
        aborted = end or _End("abort")
        error = answer.error or ErrorBody(aborted.message, code=aborted.status_code)
        return ChunkBody(error=error)
    if end is not None and isinstance(end.matched, str):
        # no stop strings are sent: it ends so what it could not sample
        return ChunkBody(error=ErrorBody(f"SGLang ended the answer: {end.matched}"))
    choice = ChoiceBody(
        token_ids=answer.output_ids,
        finish_reason=None if end is None else end.type,
        stop_reason=None if end is None else end.matched,
        logprobs=_scored(meta),
    )
    return ChunkBody([choice], UsageBody(PromptDetails(meta.cached_tokens)))


def decode_whole(data: bytes) -> WholeBody:
    """Raises msgspec.DecodeError."""
    answer = _answer(data)
    meta = answer.meta_info
    own, tops = meta.input_token_logprobs, meta.input_top_logprobs or []
    tops = [*tops, *[None] * (len(own) - len(tops))]
    scores = [_prompt_scores(*each) for each in zip(own, tops, strict=True)]
    return WholeBody(error=answer.error, prompt_logprobs=scores)


def _body(spec: RequestSpec, attempt: int, params: dict[str, Any], **fields: Any) -> bytes:
    if spec.cache_salt:
        fields["cache_salt"] = spec.cache_salt.hex()
    return _encode(
        {
            "rid": f"{spec.request_id}-{attempt}",
            "input_ids": [*spec.prompt, *spec.output],
            "priority": spec.priority,
            "sampling_params": params,
            **fields,
        }
    )


def _form(constraint: Constraint) -> dict[str, str]:
    match constraint.kind:
        case "json_object":
            return {"json_schema": '{"type":"object"}'}
        case "choice":
            choices = msgspec.json.decode(constraint.text, type=list[str])
            return {"regex": f"({'|'.join(map(re.escape, choices))})"}
        case "grammar":
            return {"ebnf": constraint.text}
        case kind:  # json_schema, regex, structural_tag
            return {kind: constraint.text}


def _scored(meta: _Meta) -> Logprobs | None:
    if meta.output_token_logprobs is None:
        return None
    tops = meta.output_top_logprobs or [None] * len(meta.output_token_logprobs)
    return Logprobs(
        [
            Scored(
                logprob=logprob or 0.0,
                token_id=token,
                top_logprobs=[
                    TopToken(logprob=each or 0.0, token_id=one) for each, one, _ in top or ()
                ],
            )
            for (logprob, token, _), top in zip(meta.output_token_logprobs, tops, strict=True)
        ]
    )


def _prompt_scores(own: _Entry, top: list[_Entry] | None) -> dict[int, Ranked] | None:
    """None of the prompt's first token, which has no score; a rank where it is among the top."""
    logprob, token, _ = own
    if logprob is None:
        return None
    ranked = {one: Ranked(each or 0.0, rank) for rank, (each, one, _) in enumerate(top or (), 1)}
    return {token: ranked.get(token, Ranked(logprob)), **ranked}


def _scrape(load: _Load, block_size: int, prefix_caching: bool) -> Scrape:
    num_blocks = load.max_total_num_tokens // block_size
    return Scrape(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        kv_usage=load.num_used_tokens / max(1, load.max_total_num_tokens),
        num_running=load.num_running_reqs,
        num_waiting=load.num_waiting_reqs,
        num_queued=load.num_waiting_reqs,
    )
