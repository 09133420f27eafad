"""worker.proto <-> messages/: the same values, typed for the wire and for us.

`*_to_proto` trusts its input; `*_from_proto` does not: a value that no worker
of ours would send raises ValueError naming the field, and the service answers
INVALID_ARGUMENT.  Limits of the model (vocabulary, context) are the engine's.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Literal, get_args

from pdcluster_schema.text import shortened
from pdcluster_worker.config.engine import MAX_RANKS
from pdcluster_worker.messages.constraint import (
    Constraint,
    ConstraintKind,
)
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello, Report, WorkerLoad
from pdcluster_worker.messages.requests import (
    EPOCH_BYTES,
    FinishReason,
    PromptLogprob,
    RequestSpec,
    SamplingParams,
    Token,
    TransferTarget,
)
from pdcluster_worker.peers.checks import (
    SAMPLING_LISTS,
    SAMPLING_REALS,
    checked_request,
    require,
    require_natural,
)
from pdcluster_worker.proto import worker_pb2 as pb

_CONSTRAINT_KINDS: dict[str, ConstraintKind] = {kind: kind for kind in get_args(ConstraintKind)}
_FINISH_REASONS: dict[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}

# Fields of Sampling that the wire and we spell and type alike.
_SAMPLING_INTEGERS = ("max_tokens", "seed", "top_k", "min_tokens")
_LOAD_FIELDS = (
    "num_running",
    "num_waiting",
    "waiting_tokens",
    "credit_queue_requests",
    "credit_queue_tokens",
    "credit_tokens",
    "free_blocks",
    "total_blocks",
    "progress",
    "longest_step_seconds",
    "busy_ratio",
    "memory_bandwidth_ratio",
)
_MAX_TRANSPORT = 32
_MAX_NOTE = 400
_LOAD_REALS = ("longest_step_seconds", "busy_ratio", "memory_bandwidth_ratio")


def geometry_to_proto(geometry: KVGeometry) -> pb.KVGeometry:
    """KV geometry."""
    return pb.KVGeometry(
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        num_layers=geometry.num_layers,
        block_size=geometry.block_size,
        dtype=geometry.dtype,
        kind=geometry.kind,
    )


def geometry_from_proto(message: pb.KVGeometry) -> KVGeometry:
    """KV geometry; any values, since the pair check compares them."""
    return KVGeometry(
        message.num_kv_heads,
        message.head_dim,
        message.num_layers,
        message.block_size,
        message.dtype,
        message.kind,
    )


def hello_to_proto(hello: Hello) -> pb.Hello:
    """Facts of one side of a pair."""
    return pb.Hello(
        engine_id=hello.engine_id,
        role=hello.role,
        geometry=geometry_to_proto(hello.geometry),
        weights=hello.weights,
        revision=hello.revision,
        tensor_parallel_size=hello.tensor_parallel_size,
        operations=hello.operations,
        model=hello.model,
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        max_batched_tokens=hello.max_batched_tokens,
        restarts_grammar=hello.restarts_grammar,
    )


def hello_from_proto(message: pb.Hello) -> Hello:
    """Facts of the other side.  Raises ValueError without an engine id."""
    require(bool(message.engine_id), "engine_id is empty")
    for name in ("tensor_parallel_size", "max_model_len", "vocab_size", "max_batched_tokens"):
        require(getattr(message, name) >= 0, f"{name} is negative")
    geometry = geometry_from_proto(message.geometry)
    return Hello(
        *(message.engine_id, message.role, geometry, message.weights, message.revision),
        tensor_parallel_size=message.tensor_parallel_size or 1,
        operations=message.operations,
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        max_batched_tokens=message.max_batched_tokens,
        restarts_grammar=message.restarts_grammar,
    )


def sampling_to_proto(sampling: SamplingParams) -> pb.Sampling:
    """The whole sampling state."""
    others = ("logit_bias", "logprobs", "prompt_logprobs", "ignore_eos")
    names = (*_SAMPLING_INTEGERS, *SAMPLING_REALS, *SAMPLING_LISTS, *others)
    message = pb.Sampling(**{name: getattr(sampling, name) for name in names})
    if (constraint := sampling.constraint) is not None:
        message.constraint.CopyFrom(
            pb.Constraint(kind=constraint.kind, text=constraint.text, strict=constraint.strict)
        )
    return message


def sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    """The whole sampling state."""
    return SamplingParams(
        **{name: getattr(message, name) for name in (*_SAMPLING_INTEGERS, *SAMPLING_REALS)},
        stop_token_ids=list(message.stop_token_ids),
        eos_token_ids=list(message.eos_token_ids),
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        ignore_eos=message.ignore_eos,
        constraint=_constraint_from_proto(message.constraint)
        if message.HasField("constraint")
        else None,
    )


def _constraint_from_proto(message: pb.Constraint) -> Constraint:
    kind = _CONSTRAINT_KINDS.get(message.kind)
    if kind is None:
        raise ValueError(f"constraint of kind {message.kind!r} is unknown")
    return Constraint(kind, message.text, message.strict)


def request_to_proto(spec: RequestSpec) -> pb.Request:
    """One request."""
    return pb.Request(
        request_id=spec.request_id,
        prompt=spec.prompt,
        output=spec.output,
        sampling=sampling_to_proto(spec.sampling),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
        ttft_slo_seconds=spec.ttft_slo_seconds,
        tpot_slo_seconds=spec.tpot_slo_seconds,
        deadline_seconds=spec.deadline_seconds,
        kv_holder=spec.kv_holder,
        verify_transfer=spec.verify_transfer,
        tenant=spec.tenant,
        prefiller=spec.prefiller,
    )


def request_from_proto(message: pb.Request) -> RequestSpec:
    """One request.  Raises ValueError as `checked_request`."""
    return checked_request(
        RequestSpec(
            request_id=message.request_id,
            prompt=list(message.prompt),
            sampling=sampling_from_proto(message.sampling),
            output=list(message.output),
            priority=message.priority,
            cache_salt=message.cache_salt,
            ttft_slo_seconds=_optional(message, "ttft_slo_seconds"),
            tpot_slo_seconds=_optional(message, "tpot_slo_seconds"),
            deadline_seconds=_optional(message, "deadline_seconds"),
            kv_holder=message.kv_holder,
            verify_transfer=message.verify_transfer,
            tenant=message.tenant,
            prefiller=message.prefiller,
        )
    )


def _optional(
    message: pb.Request,
    name: Literal["ttft_slo_seconds", "tpot_slo_seconds", "deadline_seconds"],
) -> float | None:
    value: float = getattr(message, name)
    return value if message.HasField(name) else None


def target_to_proto(target: TransferTarget) -> pb.Target:
    """Encode the target of KV writes."""
    return pb.Target(
        epoch=target.epoch,
        engine_id=target.engine_id,
        addresses=target.addresses,
        cached_tokens=target.cached_tokens,
        block_ids=target.block_ids,
    )


def target_from_proto(message: pb.Target) -> TransferTarget:
    """Decode the target of KV writes; one without blocks fetches the KV.

    Raises ValueError for what could hit a wrong block: bad epoch, negative or repeated block ids.
    """
    require(
        len(message.epoch) == EPOCH_BYTES,
        f"epoch has {len(message.epoch)} bytes instead of {EPOCH_BYTES}",
    )
    require(bool(message.engine_id), "engine_id of the target is empty")
    require(
        0 < len(message.addresses) <= MAX_RANKS,
        f"the target has {len(message.addresses)} addresses, not 1 to {MAX_RANKS}",
    )
    require(all(message.addresses), "an address of the target is empty")
    require(message.cached_tokens >= 0, "cached_tokens is negative")
    require_natural("block_ids", message.block_ids)
    require(len(set(message.block_ids)) == len(message.block_ids), "block_ids names a block twice")
    return TransferTarget(
        message.epoch,
        message.engine_id,
        list(message.addresses),
        message.cached_tokens,
        list(message.block_ids),
    )


def token_to_proto(token: Token) -> pb.Token:
    """One token; its request is known from the call."""
    return pb.Token(
        token_id=token.token_id,
        logprob=token.logprob,
        top_logprobs=_top_to_proto(token.top_logprobs),
        finish_reason=token.finish_reason or "",
        stop_reason=token.stop_reason,
        cached_tokens=token.cached_tokens,
        queue_seconds=token.queue_seconds,
        prefill_seconds=token.prefill_seconds,
        prompt_logprobs=[
            pb.PromptLogprob(
                logprob=one.logprob, rank=one.rank, top_logprobs=_top_to_proto(one.top_logprobs)
            )
            for one in token.prompt_logprobs
        ],
    )


def _top_to_proto(top: Iterable[tuple[int, float]]) -> list[pb.TopLogprob]:
    return [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]


def _top_from_proto(top: Iterable[pb.TopLogprob]) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for one in top]


def token_from_proto(request_id: str, message: pb.Token) -> Token:
    """One token of that request.

    Raises ValueError for a negative id or an unknown finish reason.
    """
    require(message.token_id >= 0, "token_id is negative")
    require(
        message.finish_reason in ("", *_FINISH_REASONS),
        f"finish_reason {message.finish_reason!r} is unknown",
    )
    return Token(
        request_id=request_id,
        token_id=message.token_id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=_top_from_proto(message.top_logprobs),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        cached_tokens=message.cached_tokens,
        queue_seconds=message.queue_seconds if message.HasField("queue_seconds") else None,
        prefill_seconds=message.prefill_seconds if message.HasField("prefill_seconds") else None,
        prompt_logprobs=[
            PromptLogprob(one.logprob, one.rank, _top_from_proto(one.top_logprobs))
            for one in message.prompt_logprobs
        ],
    )


def done_to_proto(done: PrefillDone) -> pb.PrefillDone:
    """The end of a remote prefill; its request is known from the call."""
    return pb.PrefillDone(
        num_bytes=done.num_bytes,
        seconds=done.seconds,
        checksum=done.checksum,
        busy_seconds=done.busy_seconds,
        transport=done.transport,
        handle=done.handle,
        transport_note=done.transport_note,
    )


def done_from_proto(request_id: str, message: pb.PrefillDone) -> PrefillDone:
    """The end of that request's remote prefill.  Raises ValueError for negative sizes."""
    require(message.num_bytes >= 0, "num_bytes is negative")
    for name in ("seconds", "busy_seconds"):
        require(isfinite(getattr(message, name)), f"{name} is not a finite number")
    checksum = message.checksum if message.HasField("checksum") else None
    return PrefillDone(
        request_id,
        message.num_bytes,
        message.seconds,
        checksum,
        message.busy_seconds,
        message.transport[:_MAX_TRANSPORT],
        message.handle,
        shortened(message.transport_note, _MAX_NOTE),
    )


def report_to_proto(sequence: int, report: Report) -> pb.WorkerReport:
    """A report with its number."""
    return pb.WorkerReport(
        sequence=sequence,
        snapshot=report.snapshot,
        load=load_to_proto(report.load),
        blocks_stored=report.stored,
        blocks_removed=report.removed,
    )


def load_to_proto(load: WorkerLoad) -> pb.Load:
    """A worker's load."""
    return pb.Load(state=load.state, **{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: pb.Load) -> WorkerLoad:
    """A peer's load.  Raises ValueError for a negative number and one without an end."""
    for name in _LOAD_REALS:
        require(isfinite(getattr(message, name)), f"{name} is not a finite number")
    for name in _LOAD_FIELDS:
        require(getattr(message, name) >= 0, f"{name} is negative")
    return WorkerLoad(
        state=message.state, **{name: getattr(message, name) for name in _LOAD_FIELDS}
    )
