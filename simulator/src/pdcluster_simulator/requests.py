"""A simulated request: its sizes, its way through the workers, and its times."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

from pdcluster_api.traces.requests import LoadTrace, TraceRequest
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import SamplingParams, TransferTarget


class RequestOutcome(Enum):
    RUNNING = "running"
    COMPLETE = "complete"
    REFUSED = "refused"
    CUT = "cut"


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Seconds are those of the simulation.

    hashes:     of the prompt's full blocks; none without shared prefixes
    first, end: when the client had the first token, and the last
    last_token: when it had its newest one
    """

    number: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    hashes: tuple[bytes, ...] = ()
    request_id: str = ""
    outcome: RequestOutcome = RequestOutcome.RUNNING
    is_remote: bool = False
    cached_tokens: int = 0
    num_tokens: int = 0
    first: float = -1.0
    last_token: float = -1.0
    end: float = -1.0
    refusal: str = ""


@dataclass(slots=True, eq=False)
class EngineWork(EngineRequest):
    """A request inside a simulated engine.

    synced_step:  number of decode steps when its tokens were counted last
    finish_step:  the one that makes its last token; -1 = not known yet
    residue:      of the number of a step that takes a new block for it
    last_token:   when it got its newest one; -1 = it has none
    sent_tokens:  tokens whose KV is on its way to a peer, or there
    """

    owner: SimulatedRequest | None = None
    synced_step: int = 0
    finish_step: int = -1
    residue: int = 0
    last_token: float = -1.0
    sent_tokens: int = 0
    peer: Any = None

    @classmethod
    def of(
        cls, request: SimulatedRequest, now: float, sent_blocks: int | None = None
    ) -> "EngineWork":
        """sent_blocks: that a prefill worker sends to a peer; None = it computes for itself."""
        work = cls(
            request_id=request.request_id,
            # Of the tokens only their number counts.
            tokens=cast("list[int]", bytearray(request.prompt_tokens)),
            num_prompt_tokens=request.prompt_tokens,
            sampling=_sampling(request.output_tokens),
            priority=request.priority,
            arrival_seconds=now,
            due_seconds=now + 60.0,
            target=None if sent_blocks is None else _target(sent_blocks, request.cached_tokens),
        )
        work.owner = request
        work.block_hashes = list(request.hashes)
        return work

    def add_tokens(self, number: int) -> None:
        self.tokens.extend(bytes(number))


@lru_cache(maxsize=1 << 16)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0, temperature=0.0, ignore_eos=True)


@lru_cache(maxsize=1 << 16)
def _target(num_blocks: int, cached_tokens: int) -> TransferTarget:
    """A target of so many blocks of a peer, whose ids make no difference."""
    return TransferTarget(b"", "", [], cached_tokens, cast("list[int]", range(num_blocks)))


def simulated_requests(trace: LoadTrace, block_size: int) -> Iterator[SimulatedRequest]:
    """block_size: of the engines, for the hashes of their blocks."""
    for number, each in enumerate(trace.requests):
        yield SimulatedRequest(
            number,
            each.seconds,
            each.input_tokens,
            each.output_tokens,
            each.priority,
            _hashes(each, trace.block_tokens, block_size),
            str(number),
        )


def _hashes(request: TraceRequest, block_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """One for each full block, of all ids up to its end."""
    if not request.hash_ids:
        return ()
    found, parent, position = [], b"", 0
    for end in range(block_size, request.input_tokens + 1, block_size):
        last = -(-end // block_tokens)
        ids = request.hash_ids[position:last]
        position = last - (end % block_tokens != 0)
        text = parent + repr((end % block_tokens, ids)).encode()
        parent = blake2b(text, digest_size=16).digest()
        found.append(parent)
    return tuple(found)
