"""A request inside the engine: a few counters are state, everything else is derived from them."""

from dataclasses import dataclass, field
from enum import Enum

from pdcluster_worker.messages.block_hash import extend_hashes
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget

UNDATED_SECONDS = 60.0
"""Deadline of a request that has none, for the order of the waiting line alone: those with one
overtake it for so long at most.
"""


class Status(Enum):
    """Status of a request.

    PREEMPTED is WAITING that has run before; SENDING has its first token and waits for
    acknowledgements.
    """

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SENDING = "sending"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request, its tokens and the blocks that it holds.

    tokens:               prompt and output together; `num_prompt_tokens` divides them.
    num_computed_tokens:  tokens whose KV is in `block_table`.
    num_in_flight_tokens: those after them that steps under way compute.
    num_placeholders:     tokens after the known ones that steps under way sample.
    is_ending:            the last of these ends the request, whatever it is, or makes it leave.
    is_waiting:           for the step under way: no other one takes it before that has ended.
    num_draft_blocks:     blocks at the end of `block_table` that only drafts have asked for.
    num_lost_tokens:      most tokens whose KV was here and was given up, to be computed again.
    num_null_blocks:      entries at the head of `block_table` that are the null block.
    num_cached_tokens:    prefix hit when it was first admitted (for usage), never changed after.
    block_table:          block ids in order, grown at its end or replaced by another list;
                          slot of position p is block_table[p // block_size] * block_size + p %
                          block_size.
    block_hashes:         chained hashes of the full blocks of `tokens`, grown as they fill.
    due_seconds:          of the engine's clock: when it is to be complete; UNDATED_SECONDS after
                          its arrival without a deadline.
    cache_salt, verify_transfer, tenant: see `RequestSpec`; that chain starts at the salt.
    """

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    arrival_seconds: float = 0.0
    due_seconds: float = 0.0
    target: TransferTarget | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_placeholders: int = 0
    is_ending: bool = False
    is_waiting: bool = False
    num_draft_blocks: int = 0
    num_lost_tokens: int = 0
    num_null_blocks: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: bytes = b""
    tenant: str = ""
    verify_transfer: bool = False

    @classmethod
    def from_spec(
        cls, spec: RequestSpec, now: float, target: TransferTarget | None = None
    ) -> "EngineRequest":
        """Build from the wire form; `now` is the engine's clock, in seconds."""
        return cls(
            request_id=spec.request_id,
            tokens=[*spec.prompt, *spec.output],
            num_prompt_tokens=len(spec.prompt),
            sampling=spec.sampling,
            priority=spec.priority,
            arrival_seconds=now,
            due_seconds=now
            + (UNDATED_SECONDS if spec.deadline_seconds is None else spec.deadline_seconds),
            target=target,
            cache_salt=spec.cache_salt,
            tenant=spec.tenant,
            verify_transfer=spec.verify_transfer,
        )

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks of `tokens` that have no hash yet."""
        extend_hashes(self.block_hashes, self.tokens, block_size, self.cache_salt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.tokens)

    @property
    def num_planned_tokens(self) -> int:
        """Tokens known when the steps under way have ended, whatever they are."""
        return len(self.tokens) + self.num_placeholders

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens whose KV is computed when the steps under way have ended."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far, those made elsewhere included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """True while log probabilities of its prompt are missing, so that all of it must be
        computed here.
        """
        return (
            self.sampling.prompt_logprobs is not None and len(self.tokens) == self.num_prompt_tokens
        )
