"""A model of one answer that any worker can go on with, token by token."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pdcluster_worker.errors import PeerError
from pdcluster_worker.messages.engine import EngineInput, EngineOutput, Submit, Tokens
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import totals
from tests.worker.serving.ingress.ingresses import DecodePeer

MAX_TOKENS = 6
LOST = PeerError("reset")


def spec(request_id: str = "r") -> RequestSpec:
    return RequestSpec(
        request_id, [1, 2, 3], SamplingParams(max_tokens=MAX_TOKENS, seed=1, logprobs=1)
    )


def token_at(spec: RequestSpec, position: int) -> Token:
    """Token that every worker would draw there: by the position alone."""
    reason = "length" if position == MAX_TOKENS - 1 else None
    return Token(
        spec.request_id,
        10 + position,
        -0.5 * position,
        finish_reason=reason,
        cached_tokens=position,
        queue_seconds=0.1,
    )


class Model(DecodePeer):
    """A decode worker that makes the tokens of a request from where it stands; after `ends_after`
    of its own it fails.
    """

    def __init__(self, key: str, *, ends_after: int = 99, error: Exception = LOST) -> None:
        super().__init__(key=key)
        self.ends_after, self.error = ends_after, error
        self.modes: list[PrefillMode] = []
        self.holders: list[str] = []
        self.waits_at: int | None = None
        self.goes_on = asyncio.Event()
        self.num_open = 0

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        self.requested.append(spec.request_id)
        self.outputs.append(spec.output)
        self.modes.append(prefill)
        self.holders.append(spec.kv_holder)
        self.num_open += 1
        try:
            for count, position in enumerate(range(len(spec.output), MAX_TOKENS)):
                if count == self.ends_after:
                    raise self.error
                if count == self.waits_at:
                    await self.goes_on.wait()
                yield Generated(token_at(spec, position), "local" if count == 0 else None)
        finally:
            self.num_open -= 1


def two_peers(*, restarts_grammar: bool = False, **first: int) -> tuple[Model, Model]:
    """Idle workers, of which the first is chosen."""
    peers = Model("a", **first), Model("b")
    for peer in peers:
        peer.restarts_grammar = restarts_grammar
    peers[1].load = WorkerLoad(num_running=1)
    return peers


def model_here(message: EngineInput) -> Sequence[EngineOutput]:
    if not isinstance(message, Submit):
        return ()
    return [
        Tokens([token_at(message.spec, position)])
        for position in range(len(message.spec.output), MAX_TOKENS)
    ]


async def collect(
    ingress: Ingress, *specs: RequestSpec, prefill: PrefillMode = "auto"
) -> list[Generated]:
    async with asyncio.timeout(5):
        return [generated async for generated in ingress.generate(list(specs or [spec()]), prefill)]


def ids(made: list[Generated], index: int = 0) -> list[int]:
    return [g.token.token_id for g in made if g.index == index]


WHOLE = [10, 11, 12, 13, 14, 15]


def counted(worker: WorkerContext) -> dict[tuple[str, str], float]:
    return totals(worker.metrics.request_moves, "reason", "outcome")
