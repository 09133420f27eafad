"""An ingress over decode workers that play a script."""

from collections.abc import AsyncGenerator, Sequence

from pdcluster_worker.messages.engine import EngineInput, EngineOutput, Submit, Tokens
from pdcluster_worker.messages.peers import Generated, PrefillMode, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.serving.ingress.decode_router import LOCAL
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import ScriptedEngine, dispatcher_of


class DecodePeer:
    """A decode worker that plays a script of tokens and errors."""

    def __init__(self, *script: Generated | Exception, key: str = "peer") -> None:
        self.key = key
        self.script = script
        self.load = WorkerLoad()
        self.is_draining = self.restarts_grammar = self.hands_over_kv = False
        self.requested: list[str] = []
        self.outputs: list[list[int]] = []

    async def generate(
        self, spec: RequestSpec, prefill: PrefillMode
    ) -> AsyncGenerator[Generated, None]:
        self.requested.append(spec.request_id)
        self.outputs.append(spec.output)
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            yield item


def spec(request_id: str = "r") -> RequestSpec:
    return RequestSpec(request_id, [1, 2, 3], SamplingParams(max_tokens=2, seed=1))


def two_tokens(message: EngineInput) -> Sequence[EngineOutput]:
    if not isinstance(message, Submit):
        return ()
    request_id = message.spec.request_id
    return [Tokens([Token(request_id, 7)]), Tokens([Token(request_id, 8, finish_reason="length")])]


def make_ingress(
    worker: WorkerContext, engine: ScriptedEngine, *peers: DecodePeer, pod: str = LOCAL
) -> Ingress:
    engine.answer = two_tokens

    def decodes() -> list[DecodePeer]:
        return [peer for peer in peers if not peer.is_draining]

    return Ingress(worker, dispatcher_of(worker, decodes=decodes), decodes, pod)


def busy_here(ingress: Ingress) -> None:
    ingress._local._num_decoding = 3
