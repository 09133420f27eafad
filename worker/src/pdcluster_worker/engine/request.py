"""A request inside the engine, its part in a step, its ends by its own tokens, and the order of
several.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from pdcluster_worker.messages.block_hash import extend_hashes
from pdcluster_worker.messages.engine_settings import SchedulingPolicy
from pdcluster_worker.messages.requests import (
    UNDATED_SECONDS,
    FinishReason,
    RequestSpec,
    SamplingParams,
    TierRead,
    TransferTarget,
)


class Status(Enum):
    """PREEMPTED is WAITING that has run before; SENDING waits for acknowledgements."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SENDING = "sending"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineRequest:
    request_id: str
    tokens: list[int]  # prompt and output together; `num_prompt_tokens` divides them
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    arrival_seconds: float = 0.0
    # Of the engine's clock: when it is to be complete; UNDATED_SECONDS after its arrival without a
    # deadline.
    due_seconds: float = 0.0
    group: str = ""
    target: TransferTarget | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0  # tokens whose KV is in `block_table`
    num_in_flight_tokens: int = 0  # those after them that steps in flight compute
    num_placeholders: int = 0  # tokens after the known ones that steps in flight sample
    is_ending: bool = False  # the last of these ends the request, whatever it is, or makes it leave
    is_waiting: bool = False  # for the step in flight: no other one takes it before that has ended
    num_draft_blocks: int = 0  # blocks at the end of `block_table` that only drafts have asked for
    num_lost_tokens: int = 0  # most tokens whose KV was here and was given up, to be computed again
    num_null_blocks: int = 0  # entries at the head of `block_table` that are the null block
    # Prefix hit when it was first admitted (for usage), never changed after.
    num_cached_tokens: int = 0
    # Block ids in order, grown at its end or replaced by another list; slot of position p is
    # block_table[p // block_size] * block_size + p % block_size.
    block_table: list[int] = field(default_factory=list)
    # Chained hashes of the full blocks of `tokens`, grown as they fill.
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: bytes = b""
    adapter: str = ""  # that computes it; "" = the model alone
    adapter_weights: str = ""
    tenant: str = ""
    verify_transfer: bool = False
    scheduled_seconds: float | None = None  # of the engine's clock: when it first got a slot here
    has_sampled: bool = False  # a token of it was sampled here
    tier_read: TierRead | None = None  # the last choice to read its prefix from a tier, or not

    @classmethod
    def from_spec(
        cls, spec: RequestSpec, now: float, target: TransferTarget | None = None
    ) -> "EngineRequest":
        return cls(
            request_id=spec.request_id,
            tokens=[*spec.prompt, *spec.output],
            num_prompt_tokens=len(spec.prompt),
            sampling=spec.sampling,
            priority=spec.priority,
            arrival_seconds=now,
            due_seconds=now
            + (UNDATED_SECONDS if spec.deadline_seconds is None else spec.deadline_seconds),
            group=spec.group,
            target=target,
            cache_salt=spec.cache_salt,
            adapter=spec.adapter,
            adapter_weights=spec.adapter_weights,
            tenant=spec.tenant,
            verify_transfer=spec.verify_transfer,
        )

    def extend_hashes(self, block_size: int) -> None:
        extend_hashes(self.block_hashes, self.tokens, block_size, self.cache_salt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_planned_tokens(self) -> int:
        return len(self.tokens) + self.num_placeholders

    @property
    def num_scheduled_tokens(self) -> int:
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """True while log probabilities of its prompt are missing: all of it is computed here."""
        return (
            self.sampling.prompt_logprobs is not None and len(self.tokens) == self.num_prompt_tokens
        )


class Scheduled(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of one request, whose blocks are allocated."""

    request: EngineRequest
    num_tokens: int
    start: int  # position of the first of them
    samples: bool  # whether a token is sampled after this step: all known tokens are then computed
    # The last of the tokens, which are guesses: a token is sampled after the known ones and after
    # each draft, and counts as far as the drafts before it are what was sampled.
    drafts: tuple[int, ...] = ()
    waits: bool = False  # no other step takes this request before this one has ended

    @classmethod
    def of(cls, request: EngineRequest, num_tokens: int) -> "Scheduled":
        start = request.num_scheduled_tokens
        return cls(request, num_tokens, start, start + num_tokens == request.num_planned_tokens)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_known_tokens(self) -> int:
        return self.num_tokens - len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """The tokens; shorter by the last one where the step before samples it."""
        return [*self.request.tokens[self.start : self.start + self.num_known_tokens], *self.drafts]


@dataclass(frozen=True, slots=True)
class AfterDrafts:
    """A place to sample at: a request as it is once its first drafts are accepted."""

    request: EngineRequest
    drafts: tuple[int, ...]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return self.request.num_output_tokens + len(self.drafts)


SamplePlace = EngineRequest | AfterDrafts
"""Tokens after which one is sampled."""


def sample_places(item: Scheduled) -> list[SamplePlace]:
    later = [
        AfterDrafts(item.request, item.drafts[:count]) for count in range(1, len(item.drafts) + 1)
    ]
    return [item.request, *later]


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step; decodes first, then prefill chunks."""

    items: tuple[Scheduled, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason why a request ended; stop_reason: the stop token id that ended it, if one did."""

    reason: FinishReason
    stop_reason: int | None = None


def check_stop(request: EngineRequest, max_model_len: int) -> Finish | None:
    """The end that the last token causes; stop strings are found by the server."""
    sampling, last = request.sampling, request.tokens[-1]
    is_heeded = not sampling.ignore_eos and request.num_output_tokens >= sampling.min_tokens
    # Under a constraint it is sampled too early, or though ignored, only where nothing else can
    # follow.
    if last in sampling.eos_token_ids and (is_heeded or sampling.constraint is not None):
        return Finish("stop")
    if last in sampling.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
        return Finish("stop", stop_reason=last)
    if ends_by_length(request, max_model_len, num_more=0):
        return Finish("length")
    return None


def ends_by_length(request: EngineRequest, max_model_len: int, num_more: int) -> bool:
    """Return whether `num_more` further tokens, whatever they are, end the request."""
    num_tokens = len(request.tokens) + num_more
    # What a peer goes on with ends by the peer's length, which its max_tokens keeps to.
    is_full = request.target is None and num_tokens >= max_model_len
    return is_full or num_tokens - request.num_prompt_tokens >= request.sampling.max_tokens


class Order:
    """Sort keys of a policy by priority, deferral and deadline; the least goes first."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy != "fcfs"
        self._preempts = policy == "preemptive"
        self._deferred: frozenset[str] = frozenset()  # groups
        self._evicts = False

    def defer(self, groups: Iterable[str], *, evicts: bool) -> None:
        """Lists in this order are to be sorted again."""
        if self._by_priority:
            self._deferred, self._evicts = frozenset(groups), evicts

    def running(self, request: EngineRequest) -> tuple[float, ...]:
        """Key of requests that hold blocks; the last of them is the victim of a preemption."""
        if not self._by_priority:
            return (request.arrival_seconds,)
        return (request.priority, request.group in self._deferred, request.arrival_seconds)

    def waiting(self, request: EngineRequest) -> tuple[float, ...]:
        """Key of the others: a preempted one goes to the front of its equals, then the earliest
        deadline of a priority (EDF); requests of deferred groups are behind the others.
        """
        never_ran, arrival = request.status is not Status.PREEMPTED, request.arrival_seconds
        if not self._by_priority:
            return (never_ran, arrival)
        is_deferred = request.group in self._deferred
        return (request.priority, is_deferred, never_ran, request.due_seconds, arrival)

    @property
    def preempts(self) -> bool:
        """Return whether any running request may make way for one that waits."""
        return self._preempts or (self._evicts and bool(self._deferred))

    def makes_way(self, running: EngineRequest, waiting: EngineRequest) -> bool:
        if self._preempts and running.priority > waiting.priority:
            return True
        return (
            self._evicts
            and running.priority >= waiting.priority
            and running.group in self._deferred
            and waiting.group not in self._deferred
        )
