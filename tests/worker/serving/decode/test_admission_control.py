"""Treatment of requests by priority at a decode worker: taken, degraded, shed,
demoted or refused.
"""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import (
    AdmissionSpec,
    DegradationSpec,
    EarlyRejectionSpec,
    HighPrioritySpec,
    LowPrioritySpec,
)
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Abort, EngineInput, EngineOutput, Submit
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.qos.averages import Measured
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import begin_trace
from tests.worker.serving.doubles import RecordingPeer, ScriptedEngine, collect, dispatcher_of
from tests.worker.serving.ingress.ingresses import two_tokens

LOW, NORMAL, HIGH = 100, 0, -100
BUSY = Measured(
    1.0, waiting_seconds=1.0, prompt_tokens=10, first_tokens=1, ended=1, busy_seconds=1.0
)
"""0.1 s for each prompt token ahead: ten of them are twice the default objective."""


def spec(
    request_id: str = "r", priority: int = LOW, *, max_tokens: int = 3, num_tokens: int = 10
) -> RequestSpec:
    return RequestSpec(
        request_id,
        [1] * num_tokens,
        SamplingParams(max_tokens=max_tokens, seed=1, min_tokens=2),
        priority=priority,
    )


def silent(_: EngineInput) -> Sequence[EngineOutput]:
    return ()


@pytest.fixture
def peers() -> list[RecordingPeer]:
    return []


@pytest.fixture
def dispatcher(
    worker: WorkerContext, engine: ScriptedEngine, peers: list[RecordingPeer]
) -> DecodeDispatcher:
    engine.answer = two_tokens
    return dispatcher_of(worker, peers)


async def waiting(
    dispatcher: DecodeDispatcher, engine: ScriptedEngine, *specs: RequestSpec
) -> "list[asyncio.Task[list[Generated]]]":
    """Requests that the engine has and says nothing of."""
    answer, engine.answer, num_heard = engine.answer, silent, len(engine.inputs)
    tasks = [asyncio.create_task(collect(dispatcher, each, "local")) for each in specs]
    async with asyncio.timeout(5):
        while len(engine.inputs) < num_heard + len(specs):
            await asyncio.sleep(0)
    engine.answer = answer
    return tasks


async def end(tasks: "list[asyncio.Task[list[Generated]]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def busy(dispatcher: DecodeDispatcher) -> None:
    dispatcher._admission._averages.refresh(BUSY)


def counted(worker: WorkerContext, name: str, **labels: str) -> float:
    return worker.metrics.registry.get_sample_value(f"pdcluster_qos_{name}_total", labels) or 0.0


async def test_low_priority_is_refused_before_the_engine_gets_it(dispatcher, engine, worker):
    """[O6]: others are taken at the same moment."""
    worker.policy = PolicyConfig(early_rejection=EarlyRejectionSpec(enabled=True))
    tasks = await waiting(dispatcher, engine, spec("w", NORMAL))
    busy(dispatcher)
    heard = list(engine.inputs)
    with (
        begin_trace("r") as trace,
        pytest.raises(RequestError, match=r"first token would take about 1\.0 s") as caught,
    ):
        dispatcher.admit([spec()])
    for priority in (NORMAL, HIGH):
        dispatcher.admit([spec(priority=priority)])

    assert (caught.value.status, caught.value.code, caught.value.retry_after_seconds) == (
        429,
        "slo_ttft",
        1,
    )
    assert engine.inputs == heard
    assert [event.name for event in trace.events] == ["admission", "refused"]
    assert counted(worker, "rejected", reason="slo_ttft", priority="low") == 1
    assert [counted(worker, "admitted", priority=tier) for tier in ("low", "normal", "high")] == [
        0,
        1,
        1,
    ]
    await end(tasks)


async def test_own_objective_of_a_request_goes_before_the_policy(dispatcher, engine, worker):
    worker.policy = PolicyConfig(early_rejection=EarlyRejectionSpec(enabled=True))
    tasks = await waiting(dispatcher, engine, spec("w", NORMAL))
    busy(dispatcher)

    dispatcher.admit([replace(spec(), ttft_slo_seconds=1.5)])
    dispatcher.admit([replace(spec(), output=[5])])  # it has begun elsewhere: too late to refuse it
    await end(tasks)


async def test_retry_after_of_a_full_queue_is_computed(dispatcher, engine, worker):
    worker.policy = PolicyConfig(admission=AdmissionSpec(max_queued_tokens=60))
    tasks = await waiting(dispatcher, engine, spec("w", num_tokens=60))
    busy(dispatcher)
    with pytest.raises(RequestError, match="maxQueuedTokens") as caught:
        dispatcher.admit([spec(priority=HIGH, num_tokens=40)])

    assert (caught.value.status, caught.value.code, caught.value.retry_after_seconds) == (
        503,
        "queue_full",
        4,
    )
    assert counted(worker, "rejected", reason="queue_full", priority="high") == 1
    await end(tasks)


async def test_high_priority_takes_the_place_of_the_low_one_that_came_last(
    dispatcher, engine, worker
):
    early = EarlyRejectionSpec(enabled=True)
    worker.policy = PolicyConfig(
        early_rejection=early, admission=AdmissionSpec(max_queued_requests=3)
    )
    tasks = await waiting(dispatcher, engine, spec("a"), spec("b"), spec("c", NORMAL))
    with pytest.raises(RequestError, match="maxQueuedRequests"):
        dispatcher.admit([spec("d", NORMAL)])
    dispatcher.admit([spec("e", HIGH)])
    with pytest.raises(RequestError, match="a request of high priority takes this place") as caught:
        await tasks[1]

    assert (caught.value.status, caught.value.code) == (429, "displaced")
    assert [task.done() for task in tasks] == [False, True, False]
    assert engine.inputs[-1] == Abort("b")
    await end(tasks)


async def test_low_priority_gets_fewer_tokens_under_load_and_says_so(dispatcher, engine, worker):
    worker.policy = PolicyConfig(degradation=DegradationSpec(max_tokens=1))
    assert [
        generated.degraded for generated in await collect(dispatcher, spec("calm"), "local")
    ] == [(), ()]
    tasks = await waiting(dispatcher, engine, spec("w", NORMAL))
    busy(dispatcher)
    low = await collect(dispatcher, spec("low"), "local")
    high = await collect(dispatcher, spec("high", HIGH), "local")
    await end(tasks)

    assert [generated.degraded for generated in low] == [("max_tokens=1",), ()]
    assert [generated.degraded for generated in high] == [(), ()]
    submitted = {
        each.spec.request_id: each.spec.sampling
        for each in engine.inputs
        if isinstance(each, Submit)
    }
    assert (submitted["low"].max_tokens, submitted["low"].min_tokens) == (1, 1)
    assert (submitted["calm"].max_tokens, submitted["high"].max_tokens) == (3, 3)
    assert counted(worker, "degraded", reason="max_tokens", priority="low") == 1


async def test_low_priority_may_be_barred_from_prefill_workers(dispatcher, engine, worker, peers):
    peers.append(RecordingPeer("p"))
    worker.policy = PolicyConfig(low_priority=LowPrioritySpec(prefill_workers="Barred"))
    low = await collect(dispatcher, spec("low", num_tokens=200), "auto")
    long = await collect(dispatcher, spec("long", num_tokens=256), "auto")
    with pytest.raises(RequestError, match="prefill workers are barred now") as caught:
        await collect(dispatcher, spec("forced"), "remote")

    assert [low[0].degraded, long[0].degraded] == [(), ("prefill=local",)]
    assert (caught.value.status, caught.value.code) == (429, "prefill_barred")
    assert not peers[0].claims


async def test_high_priority_goes_to_a_prefill_worker_at_once_even_from_an_idle_worker(
    dispatcher, worker, peers
):
    peers.append(RecordingPeer("p"))
    peers[0].load = replace_load(peers[0], num_waiting=99)
    worker.policy = PolicyConfig(high_priority=HighPrioritySpec(offload_at_once=True))
    task = asyncio.create_task(collect(dispatcher, spec("high", HIGH, num_tokens=64), "auto"))
    async with asyncio.timeout(5):
        while not peers[0].claims:
            await asyncio.sleep(0)
    normal = await collect(dispatcher, spec("normal", NORMAL, num_tokens=64), "auto")

    assert normal[0].prefill == "local"
    assert peers[0].claims == [("high", 64)]
    await end([task])


def replace_load(peer: RecordingPeer, num_waiting: int):
    return type(peer.load)(num_waiting=num_waiting)


async def test_low_priority_that_waited_too_long_is_shed_unless_it_waits_alone(
    dispatcher, engine, worker
):
    worker.policy = PolicyConfig(low_priority=LowPrioritySpec(threshold_milliseconds=1.0))
    (alone,) = await waiting(dispatcher, engine, spec("alone"))
    await asyncio.wait({alone}, timeout=0.02)
    assert not alone.done()

    tasks = await waiting(dispatcher, engine, spec("normal", NORMAL), spec("high", HIGH))
    async with asyncio.timeout(5):
        with pytest.raises(RequestError, match="no first token in 1 ms") as caught:
            await alone

    assert (caught.value.status, caught.value.code) == (429, "waited_too_long")
    assert caught.value.retry_after_seconds
    assert engine.inputs[-1] == Abort("alone")
    assert not any(task.done() for task in tasks)
    assert counted(worker, "rejected", reason="waited_too_long", priority="low") == 1
    await end(tasks)


async def test_normal_priority_that_waited_too_long_starts_over_as_low(dispatcher, engine, worker):
    worker.policy = PolicyConfig(
        low_priority=LowPrioritySpec(threshold_milliseconds=1.0, past_threshold="Demote")
    )
    late = (
        await waiting(dispatcher, engine, replace(spec("late", NORMAL), deadline_seconds=20.0))
    )[0]
    high = await waiting(dispatcher, engine, spec("high", HIGH), spec("low", LOW))
    async with asyncio.timeout(5):
        tokens = await late

    assert [generated.token.token_id for generated in tokens] == [7, 8]
    assert tokens[0].degraded == ("priority=low",)
    again = next(
        each.spec
        for each in engine.inputs
        if isinstance(each, Submit) and each.spec.request_id == "late-low"
    )
    assert again.priority == LOW
    assert again.deadline_seconds is not None
    assert again.deadline_seconds < 20.0  # it does not begin again
    assert not any(task.done() for task in high)  # neither high nor low priority moves down
    assert counted(worker, "degraded", reason="priority", priority="normal") == 1
    await end(high)


async def test_a_request_that_is_given_up_leaves_nothing_behind(dispatcher, engine, worker):
    tasks = await waiting(dispatcher, engine, spec("a"), spec("b", NORMAL))
    await end(tasks)
    quality = dispatcher._admission

    assert (quality.num_waiting, quality.waiting_tokens, dispatcher.num_requests) == (0, 0, 0)
    assert not worker.estimation.queue.requests
    assert await collect(dispatcher, spec("c"), "local")


async def test_estimates_are_in_the_metrics(dispatcher, engine, worker):
    value = worker.metrics.registry.get_sample_value
    # NaN: nothing is known
    assert value("pdcluster_qos_estimated_ttft_seconds") != value(
        "pdcluster_qos_estimated_ttft_seconds"
    )
    tasks = await waiting(dispatcher, engine, spec("w", NORMAL))
    busy(dispatcher)

    assert value("pdcluster_qos_estimated_ttft_seconds") == pytest.approx(1.0)
    await end(tasks)


async def test_request_that_has_begun_elsewhere_is_not_shed(dispatcher, engine, worker):
    worker.policy = PolicyConfig(low_priority=LowPrioritySpec(threshold_milliseconds=1.0))
    tasks = await waiting(dispatcher, engine, replace(spec("moved"), output=[7]), spec("new"))

    # the new one alone is watched
    assert [wait.num_tokens for wait in dispatcher._admission._pending] == [10]
    await end(tasks)
