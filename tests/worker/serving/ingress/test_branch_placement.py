"""Choices of one prompt that go to other decode workers, and what follows where one of these fails
or refuses.
"""

from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.routing.decode_choice import RouteHints
from pdcluster_worker.routing.qos.load_shedding import PRIORITIES
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from tests.worker.serving.doubles import ScriptedEngine, stats, totals, until
from tests.worker.serving.ingress.ingresses import make_ingress
from tests.worker.serving.ingress.moving_model import WHOLE, Model, counted, ids, model_here

NUM_CHOICES = 6
SPECS = [
    RequestSpec(f"r-{index}", [1, 2, 3, 4] * 4, SamplingParams(max_tokens=100, seed=index))
    for index in range(NUM_CHOICES)
]
ROOMY = WorkerLoad(free_blocks=1000, total_blocks=1000)


def fellow(key: str, **does: object) -> Model:
    peer = Model(key, **does)  # type: ignore[arg-type]
    peer.load, peer.hands_over_kv = ROOMY, True
    return peer


@pytest.fixture
async def ingress_of(worker: WorkerContext, engine: ScriptedEngine):
    """An ingress of the pod `home`, busy from its second request on, beside these peers."""

    async def make(*peers: Model, threshold: int = 2) -> Ingress:
        worker.policy = PolicyConfig(
            branches="Spread",
            offload=PolicyConfig().offload.model_copy(update={"decode_load_threshold": threshold}),
        )
        found = make_ingress(worker, engine, *peers, pod="home")
        engine.answer = model_here
        engine.say(stats(free_blocks=64))
        await until(lambda: worker.load().free_blocks)
        return found

    return make


async def run(ingress: Ingress, specs: list[RequestSpec] = SPECS, **options: object) -> list:
    return [each async for each in ingress.generate(specs, "auto", **options)]  # type: ignore[arg-type]


def placed(worker: WorkerContext) -> dict[str, float]:
    return totals(worker.metrics.request_branches, "place")


async def test_choices_are_spread_and_read_the_prompt_from_the_worker_of_the_first(
    worker, engine, ingress_of
):
    first, second = fellow("a"), fellow("b")
    made = await run(await ingress_of(first, second))

    assert [ids(made, index) for index in range(NUM_CHOICES)] == [WHOLE] * NUM_CHOICES
    assert (len(first.requested), len(second.requested)) == (2, 2)
    assert {*first.holders, *second.holders} == {"home"}
    assert [message.spec.request_id for message in engine.inputs] == ["r-0", "r-1"]
    assert placed(worker) == {"home": 1.0, "moved": 4.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"priority": PRIORITIES["low"]},
        {"sampling": replace(SPECS[0].sampling, prompt_logprobs=1)},
        {"sampling": replace(SPECS[0].sampling, max_tokens=20)},
    ],
    ids=["low priority", "log probabilities of the prompt", "short answers"],
)
async def test_choices_stay_together(worker, ingress_of, changes):
    peer = fellow("a")
    made = await run(await ingress_of(peer), [replace(spec, **changes) for spec in SPECS])

    assert (ids(made, 5), peer.requested, placed(worker)) == (WHOLE, [], {"home": 5.0})


async def test_choices_stay_together_unless_the_object_asks_to_spread_them(worker, ingress_of):
    peer = fellow("a")
    ingress = await ingress_of(peer)
    worker.policy = worker.policy.model_copy(update={"branches": PolicyConfig().branches})
    made = await run(ingress)

    assert (ids(made, 5), peer.requested) == (WHOLE, [])


async def test_choices_stay_on_a_worker_that_is_not_busy(worker, ingress_of):
    peer = fellow("a")
    worker.policy = PolicyConfig()
    await run(await ingress_of(peer, threshold=7), SPECS[:2])

    assert (peer.requested, placed(worker)) == ([], {"home": 1.0})


async def test_choices_of_a_pinned_request_stay_where_it_is_pinned(worker, ingress_of):
    pinned, other = fellow("a"), fellow("b")
    await run(await ingress_of(pinned, other), hints=RouteHints(worker="a"))

    assert (len(pinned.requested), other.requested) == (NUM_CHOICES, [])
    assert set(pinned.holders) == {""}


async def test_choices_go_to_no_worker_that_cannot_read_kv(ingress_of):
    peer = fellow("a")
    peer.hands_over_kv = False
    await run(await ingress_of(peer))

    assert peer.requested == []


@pytest.mark.parametrize(
    "error",
    [PeerError("gone"), RequestError("too many wait", status=503, code="queue_full")],
    ids=["lost", "full"],
)
async def test_choices_that_a_worker_refuses_run_at_home(engine, ingress_of, error):
    made = await run(await ingress_of(fellow("a", ends_after=0, error=error)))

    assert [ids(made, index) for index in range(NUM_CHOICES)] == [WHOLE] * NUM_CHOICES
    assert len(engine.inputs) == NUM_CHOICES


async def test_choices_of_a_worker_that_is_lost_move(worker, ingress_of):
    lost = fellow("a", ends_after=2)
    made = await run(await ingress_of(lost))

    assert [ids(made, index) for index in range(NUM_CHOICES)] == [WHOLE] * NUM_CHOICES
    assert counted(worker) == {("lost", "moved"): len(lost.requested)}


async def test_closing_ends_the_choices_on_every_worker(ingress_of):
    peers = [fellow("a"), fellow("b")]
    for peer in peers:
        peer.waits_at = 3
    async with aclosing((await ingress_of(*peers)).generate(SPECS, "auto")) as tokens:
        while not all(peer.num_open == 2 for peer in peers):
            await anext(tokens)

    assert [peer.num_open for peer in peers] == [0, 0]


async def test_abort_ends_one_choice_at_another_worker(ingress_of):
    peer = fellow("a")
    peer.waits_at = 3
    ingress = await ingress_of(peer)
    async with aclosing(ingress.generate(SPECS, "auto")) as tokens:
        while peer.num_open < 3:
            await anext(tokens)
        ingress.abort(peer.requested[0])
        await until(lambda: peer.num_open == 2)


async def test_choices_of_a_peers_prompt_come_here_unless_too_many_wait(worker, engine, ingress_of):
    home = fellow("a")
    ingress = await ingress_of(home)
    ingress._local._num_decoding = 1
    await run(ingress)

    assert {message.spec.kv_holder for message in engine.inputs} == {"a"}
    assert placed(worker) == {"home": 4.0, "moved": 1.0}  # there are blocks for one

    engine.inputs.clear()
    worker.policy = worker.policy.model_copy(
        update={"admission": worker.policy.admission.model_copy(update={"max_queued_requests": 0})}
    )
    await run(ingress)
    assert engine.inputs == []
