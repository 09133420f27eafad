"""Requests of adapters that workers have loaded while they run go where those very weights are."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import RacingSpec
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.adapters import ResidentAdapters
from pdcluster_worker.messages.engine import EngineInput, EngineOutput, RequestFailed, Submit
from pdcluster_worker.messages.peers import Generated, Report, WorkerLoad, decode_report, encode
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.serving.backend import RouterBackend, WorkerBackend
from pdcluster_worker.serving.ingress.attempt import HedgePolicy
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.serving.worker_runtime import WorkerRuntime
from tests.worker.serving.doubles import dispatcher_of
from tests.worker.serving.ingress.ingresses import DecodePeer, make_ingress

HERE = {"sql": "w1"}


def peer(key: str, adapters: Mapping[str, str], *script: Generated | Exception) -> DecodePeer:
    made = DecodePeer(
        *(script or [Generated(Token("r", 5, finish_reason="length"), "local")]), key=key
    )
    made.load = WorkerLoad(adapters={**adapters})
    return made


def load_here(worker: WorkerContext, adapters: Mapping[str, str]) -> None:
    worker.engines.first.client.adapters.take(ResidentAdapters({**adapters}))


def spec(weights: str = "w1") -> RequestSpec:
    sampling = SamplingParams(max_tokens=2, seed=1)
    return RequestSpec("r", [1, 2, 3], sampling, adapter="sql", adapter_weights=weights)


async def tokens(ingress, spec: RequestSpec) -> list[int]:
    return [each.token.token_id async for each in ingress.generate([spec], "auto")]


async def test_a_request_goes_to_the_worker_that_has_its_adapter(worker, engine):
    """Though this one, and others, have less to do."""
    peers = [peer("a", {}), peer("b", {"sql": "w2"}), peer("c", HERE)]
    peers[2].load = msgspec.structs.replace(peers[2].load, num_running=50)
    ingress = make_ingress(worker, engine, *peers)

    assert await tokens(ingress, spec()) == [5]
    assert [each.requested for each in peers] == [[], [], ["r"]]


async def test_it_runs_here_where_no_other_worker_has_it(worker, engine):
    peers = [peer("a", {}), peer("b", {"sql": "w2"})]
    load_here(worker, HERE)

    assert await tokens(make_ingress(worker, engine, *peers), spec()) == [7, 8]


async def test_one_that_no_worker_has_is_unknown(worker, engine):
    load_here(worker, {"sql": "w3"})
    ingress = make_ingress(worker, engine, peer("a", {"sql": "w2"}))
    with pytest.raises(RequestError) as refused:
        await tokens(ingress, spec())

    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert refused.value.message == (
        "adapter 'sql' is loaded at no worker that takes requests now, or with other weights: load "
        "it again, or retry later"
    )


async def test_after_a_failure_it_goes_on_where_the_adapter_is(worker, engine):
    first = Generated(Token("r", 4), "local")
    for script in ([PeerError("lost")], [first, PeerError("lost")]):
        lost, other = peer("a", HERE, *script), peer("b", HERE)
        other.load = msgspec.structs.replace(other.load, num_running=50)
        ingress = make_ingress(worker, engine, lost, other)
        made = await tokens(ingress, spec())

        assert made[-1] == 5
        assert (lost.requested, other.requested) == (["r"], ["r~1"])


def unloaded(message: EngineInput) -> Sequence[EngineOutput]:
    """The answer of an engine here that has lost the adapter since."""
    if not isinstance(message, Submit):
        return ()
    return [RequestFailed(message.spec.request_id, "gone", lacks_adapter=True)]


@pytest.mark.parametrize("is_here", [True, False])
async def test_one_whose_adapter_is_unloaded_on_its_way_goes_to_another(worker, engine, is_here):
    late = peer("a", HERE, RequestError("gone", status=404, code="model_not_found"))
    other = peer("b", HERE)
    other.load = msgspec.structs.replace(other.load, num_running=50)
    if is_here:
        load_here(worker, HERE)
    ingress = make_ingress(worker, engine, *([other] if is_here else [late, other]))
    engine.answer = unloaded

    assert await tokens(ingress, spec()) == [5]
    assert late.requested == ([] if is_here else ["r"])


@pytest.mark.parametrize("is_here", [True, False])
async def test_one_whose_adapter_is_unloaded_everywhere_is_unknown(worker, engine, is_here):
    late = peer("a", HERE, RequestError("gone", status=404, code="model_not_found"))
    if is_here:
        load_here(worker, HERE)
    ingress = make_ingress(worker, engine, *([] if is_here else [late]))
    engine.answer = unloaded
    with pytest.raises(RequestError, match="gone") as refused:
        await tokens(ingress, spec())
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


async def test_both_workers_of_a_race_have_it(worker):
    worker.policy = PolicyConfig(racing=RacingSpec(enabled=True, max_ratio=1.0))
    without, with_it = peer("a", {}), peer("b", HERE)
    policy = HedgePolicy(worker, dispatcher_of(worker), lambda: [without])
    load_here(worker, HERE)
    assert policy.hedge([spec()], None) is None
    policy = HedgePolicy(worker, dispatcher_of(worker), lambda: [without, with_it])
    hedge = policy.hedge([spec()], None)
    assert hedge is not None
    assert hedge.workers == (None, with_it)


async def test_peers_get_it_at_once(worker):
    reports = worker.reports()
    assert (await anext(reports)).load.adapters == {}
    load_here(worker, HERE)
    report = await anext(reports)
    assert report.load.adapters == HERE
    assert decode_report(encode(report)).load.adapters == HERE
    await reports.aclose()


def test_a_peer_names_a_limited_number() -> None:
    many = {str(number): "w" for number in range(65)}
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        decode_report(encode(Report(load=WorkerLoad(adapters=many))))


def runtime_of(worker: WorkerContext, *peers: DecodePeer) -> WorkerRuntime:
    return cast(
        WorkerRuntime, SimpleNamespace(worker=worker, decodes=lambda: peers, on_peers=lambda: None)
    )


async def test_clients_may_name_what_any_decode_worker_has(worker):
    peers = [peer("a", {"fr": "f1"}), peer("b", {"fr": "f2"}), peer("c", {"fr": "f2", **HERE})]
    backend = WorkerBackend("m", worker.engines, ["law"])
    assert backend.adapters == {"law": ""}
    backend.serve(runtime_of(worker, *peers))
    assert backend.adapters == {"law": "", "fr": "f2", "sql": "w1"}
    load_here(worker, {"fr": "f1"})
    assert backend.adapters["fr"] == "f1"  # its own go first
    load_here(worker, {})
    assert backend.adapters["fr"] == "f2"


def test_a_router_has_those_of_its_workers_and_loads_none():
    backend = RouterBackend("m", 100, 100, ["law"])
    assert backend.adapters == {"law": ""}
    with pytest.raises(RequestError, match="send this to each worker") as refused:
        backend.adapter_calls()
    assert refused.value.status == 404


async def test_adapters_are_not_loaded_where_the_object_does_not_allow_it(worker):
    with pytest.raises(RequestError, match=r"set model\.runtimeAdapters of the") as refused:
        WorkerBackend("m", worker.engines).adapter_calls()
    assert refused.value.status == 403
    backend = WorkerBackend("m", worker.engines, loads_adapters=True)
    with pytest.raises(RequestError, match="is not ready") as refused:
        backend.adapter_calls()
    assert refused.value.status == 503
    backend.engines_are_ready()
    assert backend.adapter_calls() is worker.engines.first.client.adapters
