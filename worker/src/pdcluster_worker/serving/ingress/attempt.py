"""Attempts of a choice at decode workers, one after another or as a hedge.

Before the first token a failed attempt means another try elsewhere; after it the choice migrates:
the next attempt gets the prompt and what was made so far.  No position is sent twice.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec.structs import replace

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import HedgeBudget, MigrationReason, attempt_id, hedge_target
from pdcluster_worker.routing.qos.load_shedding import PRIORITIES, aged
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.engines.client import (
    ENGINE_STALLED,
    MODEL_NOT_FOUND,
    OUT_OF_BLOCKS,
    AdapterGoneError,
    EngineDiedError,
    EngineStalledError,
    ShortOfBlocksError,
)
from pdcluster_worker.serving.estimation import UnmeetableDeadlineError
from pdcluster_worker.serving.ingress.decode_router import LOCAL, key_of, name_of
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Merged, Stream
from pdcluster_worker.tracing.request_trace import add_event

_DEMOTED = "priority=low"
"""Entry in the losses of a request: see `serving.decode.admission_control`."""


class AttemptCancelledError(PeerError):
    """An attempt was ended here, because its worker drains and another takes the choice."""

    def __init__(self) -> None:
        super().__init__("the decode worker drains")


@dataclass(slots=True)
class RequestProgress:
    """Output of a choice so far, and the workers that made it."""

    spec: RequestSpec
    prefill: PrefillMode
    clock: Callable[[], float]
    arrival_seconds: float  # by the clock; deadlines count from it
    output: list[int] = field(default_factory=list)  # tokens that were passed on
    num_attempts: int = 0  # begun, the present one included
    num_moves: int = 0  # attempts that were begun after the first token
    # Keys of the workers that failed since the last token, `LOCAL` for this one.
    failed: set[str] = field(default_factory=set)
    # The worker, if any, that would go on with it but was left; the last resort.
    left: list[Peer | None] = field(default_factory=list)
    # Why the present attempt was begun after the first token, until its own first one.
    moves_for: MigrationReason | None = None
    # Pod of the worker that was left, for the next attempt; empty = none has its KV.
    kv_holder: str = ""
    is_over: bool = False  # its last token was passed on

    @property
    def has_begun(self) -> bool:
        return bool(self.output)

    def so_far(self) -> RequestSpec:
        return replace(self.spec, output=[*self.spec.output, *self.output])

    def next_attempt(self) -> tuple[RequestSpec, PrefillMode]:
        """The request of the next attempt; only the first may be forced to be remote."""
        spec = self.spec
        if self.num_attempts:
            attempt = attempt_id(spec.request_id, self.num_attempts)
            spec = replace(
                self.so_far(), request_id=attempt, kv_holder=self.kv_holder, prefiller=""
            )
            self.kv_holder = ""
        self.num_attempts += 1
        is_later = self.has_begun and self.prefill == "remote"
        return aged(spec, self.clock() - self.arrival_seconds), "auto" if is_later else self.prefill

    def take(self, generated: Generated) -> Generated:
        """Note the next token, and return it as one of the choice's, whatever attempt it is of."""
        token, is_first_attempt = generated.token, self.num_attempts == 1
        is_first = not self.output
        self.output.append(token.token_id)
        self.is_over = token.finish_reason is not None
        if generated.degraded:
            self.spec = _as_degraded(self.spec, generated.degraded)
        if self.failed:
            self.failed.clear()
        if is_first_attempt:
            return generated
        token = replace(token, request_id=self.spec.request_id)
        if is_first:
            return replace(generated, token=token)
        return replace(
            generated,
            token=replace(token, queue_seconds=None, prefill_seconds=None),
            prefill=None,
        )


class Attempt(AsyncIterator[Generated]):
    """A choice's run at a peer, which can be cancelled while its next token is waited for."""

    def __init__(
        self, progress: RequestProgress, peer: Peer, open_attempts: "set[Attempt]"
    ) -> None:
        self.progress = progress
        self.peer = peer
        self._tokens = peer.generate(*progress.next_attempt())
        self._open_attempts = open_attempts
        self._is_cancelled = False
        self._waiting: asyncio.Task[object] | None = None
        open_attempts.add(self)

    def cancel(self) -> None:
        """End it at the next token, or now while none has come; again is a no-op."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def __anext__(self) -> Generated:
        """Raises AttemptCancelledError, and whatever the peer's stream raises."""
        if self._is_cancelled:
            raise AttemptCancelledError
        task = self._waiting = asyncio.current_task()
        assert task is not None, "an attempt is run by a task"
        try:
            return await anext(self._tokens)
        except asyncio.CancelledError:
            if not self._is_cancelled or task.uncancel():
                raise
            raise AttemptCancelledError from None
        finally:
            self._waiting = None

    async def aclose(self) -> None:
        self._open_attempts.discard(self)
        await self._tokens.aclose()


def _as_degraded(spec: RequestSpec, lost: Iterable[str]) -> RequestSpec:
    """The request as its worker runs it: a bound or a priority that was lowered there holds on the
    next one too.

    >>> from pdcluster_worker.messages.requests import SamplingParams
    >>> spec = RequestSpec("r", [1], SamplingParams(max_tokens=100, seed=1, min_tokens=50))
    >>> lowered = _as_degraded(spec, ["prefill=local", "max_tokens=20", "priority=low"])
    >>> lowered.sampling.max_tokens, lowered.sampling.min_tokens, lowered.priority
    (20, 20, 100)
    """
    for what in lost:
        name, _, value = what.partition("=")
        if name == "max_tokens":
            spec = replace(spec, sampling=spec.sampling.capped(int(value)))
        elif what == _DEMOTED:
            spec = replace(spec, priority=PRIORITIES["low"])
    return spec


def reason_of(error: PeerError | RequestError) -> MigrationReason | None:
    """Reason to migrate after this error; None = the request itself is at fault."""
    if isinstance(error, AttemptCancelledError):
        return "draining"
    if isinstance(error, PeerError | EngineDiedError):
        return "lost"
    if error.code == MODEL_NOT_FOUND:
        return "lost"
    if error.status != _UNAVAILABLE:
        return None
    if error.code == ENGINE_STALLED:
        return "stalled"
    if error.code == OUT_OF_BLOCKS:
        return "preempted"
    return "draining" if error.code == "draining" else "lost"


_UNAVAILABLE = 503  # draining, full or its engine dead: another worker may well serve the request


def is_engines(error: Exception) -> bool:
    """Return whether an engine of this worker is at fault, not the request itself."""
    return isinstance(
        error,
        EngineDiedError
        | EngineStalledError
        | ShortOfBlocksError
        | AdapterGoneError
        | UnmeetableDeadlineError,
    )


@dataclass(slots=True)
class Hedge:
    """Two workers, None = this one, that run one attempt each until one makes a token."""

    workers: tuple[Peer | None, Peer | None]
    ahead: int = 0  # the one whose attempt goes on, or ended last
    # Keys of those whose attempts ended before, while there was no token.
    failed: set[str] = field(default_factory=set)

    @property
    def where(self) -> Peer | None:
        return self.workers[self.ahead]


class HedgePolicy:
    """Choose the requests that race; one per ingress.  decodes: peers that take new work."""

    def __init__(
        self, worker: WorkerContext, local: DecodeDispatcher, decodes: Callable[[], list[Peer]]
    ) -> None:
        self._worker = worker
        self._local = local
        self._decodes = decodes
        self._budget = HedgeBudget()

    def hedge(self, specs: Sequence[RequestSpec], first: Peer | None) -> Hedge | None:
        """The hedge of a prompt's first choice; None = it runs at `first` alone."""
        policy = self._worker.policy.racing
        if not policy.enabled or not self._budget.earn(policy):
            return None
        spec = specs[0]
        peers = {peer.key: peer for peer in self._decodes() if spec.runs_with(peer.load.adapters)}
        loads = {key: peer.load.num_requests for key, peer in peers.items()}
        if first is None or self._worker.takes(spec):
            loads[LOCAL] = self._local.num_requests
        key = hedge_target(policy, key_of(first), loads)
        if key is None or (key == LOCAL and not self._admits(specs)):
            return None
        self._budget.spend()
        add_event("race", first=name_of(first), rival=key or "here")
        return Hedge((first, peers.get(key)))

    def _admits(self, specs: Sequence[RequestSpec]) -> bool:
        try:
            self._local.admit(specs[:1])
        except RequestError:
            return False
        return True


async def run_hedged(
    metrics: Metrics,
    hedge: Hedge,
    progress: RequestProgress,
    attempts: Sequence[Stream[Generated]],
) -> AsyncGenerator[Generated, None]:
    """The tokens of the attempt that makes the first one.  Raises the last one's error."""
    merged = Merged([_numbered(index, attempt) for index, attempt in enumerate(attempts)])
    has_won = False
    async with aclosing(merged):
        async for index, item in merged:
            if has_won and index != hedge.ahead:
                continue  # it came while its attempt was being closed
            if isinstance(item, Generated):
                if not has_won:
                    has_won, hedge.ahead = True, index
                    hedge.failed.clear()
                    merged.end(1 - index)
                    metrics.races.labels("rival" if index else "first").inc()
                    metrics.race_wasted_tokens.inc(len(progress.spec.prompt))
                    add_event("race_won", by="rival" if index else "first")
                yield item
            elif has_won:
                raise item
            elif hedge.failed:
                hedge.ahead = index
                metrics.races.labels("none").inc()
                raise item
            else:
                hedge.failed.add(key_of(hedge.workers[index]))


async def _numbered(
    index: int, attempt: Stream[Generated]
) -> AsyncGenerator[tuple[int, Generated | PeerError | RequestError], None]:
    async with aclosing(attempt):
        try:
            async for generated in attempt:
                yield index, generated
        except (PeerError, RequestError) as e:
            yield index, e
