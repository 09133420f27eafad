"""Messages of another worker, decoded and checked: ValueError names the impossible field.

What the types of `messages` say is checked in decoding; limits of the model are the engine's.
"""

import re
from collections.abc import Iterable, Sequence
from math import isfinite

import msgspec

from pdcluster_schema.ports import MAX_RANKS
from pdcluster_schema.text import shortened
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import (
    PrefillCall,
    PrefixPushed,
    PushPrefix,
    TraceEvent,
    decode_prefill,
    decode_prefill_reply,
    decode_prefix_pushed,
    decode_push_prefix,
    decode_target,
)
from pdcluster_worker.messages.requests import (
    EPOCH_BYTES,
    IMAGE_URL,
    MAX_CONSTRAINT_CHARACTERS,
    SALT_BYTES,
    RequestSpec,
    SamplingParams,
    Token,
    TransferTarget,
)

_SAMPLING_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
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
_SAMPLING_IDS = ("logit_bias", "stop_token_ids", "eos_token_ids")
_INTEGERS = 1 << 31
_LOSS = re.compile("[!-+.-~-]{1,64}")  # no space and no comma, which part them
_MAX_LOSSES = 8
_MAX_GROUP = 100  # characters
_MAX_TRANSPORT = 32
_MAX_TRANSPORT_NOTE = 400

MAX_EVENTS = 64
"""Taken of one message: a request has about ten."""

MAX_FACTS = 32
"""Taken of one event: about ten are in the longest."""

MAX_CHARACTERS = 1000
"""Taken of a name or a text."""


def parse_prefill(message: bytes) -> PrefillCall:
    call = decode_prefill(message)
    checked_request(call.spec)
    checked_target(call.target)
    return call


def parse_push_prefix(message: bytes) -> PushPrefix:
    call = decode_push_prefix(message)
    checked_request(call.spec)
    return call


def parse_prefix_pushed(request_id: str, message: bytes) -> PrefixPushed:
    pushed = decode_prefix_pushed(message)
    checked_token(request_id, pushed.first_token)
    return msgspec.structs.replace(pushed, done=checked_done(request_id, pushed.done))


def parse_target(message: bytes) -> TransferTarget:
    return checked_target(decode_target(message))


def parse_prefill_reply(request_id: str, message: bytes) -> Token | PrefillDone:
    reply = decode_prefill_reply(message)
    if reply.first_token is not None:
        return checked_token(request_id, reply.first_token)
    if reply.done is None:
        raise ValueError("first_token and done are missing")
    return checked_done(request_id, reply.done)


def checked_request(spec: RequestSpec) -> RequestSpec:
    _require(bool(spec.request_id), "request_id is empty")
    _require(len(spec.prompt) > 0, "prompt is empty")
    _require_naturals("prompt", spec.prompt)
    _require_naturals("output", spec.output)
    num_salt = len(spec.cache_salt)
    _require(
        num_salt in (0, SALT_BYTES), f"cache_salt has {num_salt} bytes, not {SALT_BYTES} or none"
    )
    end = 0
    for image in spec.images:
        _require(image.offset >= end and image.length > 0, "images overlap, or have no tokens")
        _require(image.url.startswith(IMAGE_URL), f"the URL of an image is not {IMAGE_URL}")
        end = image.offset + image.length
    _require(end <= len(spec.prompt), "an image ends after the prompt")
    _require(len(spec.group) <= _MAX_GROUP, f"group has over {_MAX_GROUP} characters")
    _require(abs(spec.priority) <= 1 << 31, "priority is not of 32 bits")
    for name in ("ttft_slo_seconds", "tpot_slo_seconds", "deadline_seconds"):
        seconds = getattr(spec, name)
        _require(seconds is None or (isfinite(seconds) and seconds > 0), f"{name} is not a time")
    _check_sampling(spec.sampling)
    return spec


def _check_sampling(sampling: SamplingParams) -> None:
    for name in _SAMPLING_REALS:
        _require(isfinite(getattr(sampling, name)), f"{name} is not a finite number")
    for name in _SAMPLING_NATURALS:
        value = getattr(sampling, name) or 0
        _require(value >= 0, f"{name} is negative")
        _require(isinstance(value, float) or value < _INTEGERS, f"{name} is over 32 bits")
    _require(sampling.max_tokens >= 1, "max_tokens is below 1")
    _require(0 <= sampling.seed < 1 << 64, "seed is not of 64 bits")
    _require(all(map(isfinite, sampling.logit_bias.values())), "logit_bias is not a finite number")
    for name in _SAMPLING_IDS:
        _require_naturals(name, getattr(sampling, name))
    if sampling.constraint is not None:
        num_characters = len(sampling.constraint.text)
        _require(
            num_characters <= MAX_CONSTRAINT_CHARACTERS,
            f"constraint has {num_characters} characters, over {MAX_CONSTRAINT_CHARACTERS}",
        )


def checked_target(target: TransferTarget) -> TransferTarget:
    """Target of KV writes, or of a fetch if it has no blocks; none that could hit a wrong block."""
    num_epoch, num_addresses = len(target.epoch), len(target.addresses)
    _require(num_epoch == EPOCH_BYTES, f"epoch has {num_epoch} bytes instead of {EPOCH_BYTES}")
    _require(bool(target.engine_id), "engine_id of the target is empty")
    _require(
        0 < num_addresses <= MAX_RANKS,
        f"the target has {num_addresses} addresses, not 1 to {MAX_RANKS}",
    )
    _require(all(target.addresses), "an address of the target is empty")
    _require(target.cached_tokens >= 0, "cached_tokens is negative")
    _require_naturals("block_ids", target.block_ids)
    _require(len(set(target.block_ids)) == len(target.block_ids), "block_ids names a block twice")
    return target


def checked_token(request_id: str, token: Token) -> Token:
    _require(token.request_id == request_id, "a token is of another request")
    _require(token.token_id >= 0, "token_id is negative")
    return token


def checked_done(request_id: str, done: PrefillDone) -> PrefillDone:
    _require(done.request_id == request_id, "the end of a prefill is of another request")
    _require(done.num_bytes >= 0, "num_bytes is negative")
    for name in ("seconds", "busy_seconds"):
        _require(isfinite(getattr(done, name)), f"{name} is not a finite number")
    return msgspec.structs.replace(
        done,
        transport=done.transport[:_MAX_TRANSPORT],
        transport_note=shortened(done.transport_note, _MAX_TRANSPORT_NOTE),
    )


def losses(values: Iterable[str]) -> tuple[str, ...]:
    """Losses of a request that a peer sent, as far as a header can carry them."""
    return tuple(what for what in values if _LOSS.fullmatch(what))[:_MAX_LOSSES]


def sanitize_events(
    events: Sequence[TraceEvent], began_seconds: float, worker: str
) -> tuple[TraceEvent, ...]:
    """Trace events of a peer by our clock, bounded: they are shown, never acted on.

    began_seconds: of the call here, from which their seconds count.
    """
    return tuple(
        TraceEvent(
            event.name[:MAX_CHARACTERS],
            began_seconds + max(0.0, event.seconds),
            {
                name[:MAX_CHARACTERS]: fact[:MAX_CHARACTERS] if isinstance(fact, str) else fact
                for name, fact in list(event.facts.items())[:MAX_FACTS]
                if not isinstance(fact, float) or isfinite(fact)
            },
            worker,
        )
        for event in events[:MAX_EVENTS]
        if isfinite(event.seconds)
    )


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise ValueError(otherwise)


def _require_naturals(name: str, values: Iterable[int]) -> None:
    _require(min(values, default=0) >= 0, f"{name} holds a negative number")
    _require(max(values, default=0) < _INTEGERS, f"{name} holds a number of over 32 bits")
