"""Workers that leave under load: no stream is cut, none differs, and what still arrives is served
elsewhere.

Two prefill and three decode workers.  Draining starts by the operator's command
key in etcd or by SIGTERM, of several workers at a time.  Behind a router a trace
goes on while workers are killed, drained, ended and added.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import httpx
import pytest

from bench.request_trace import Length, SimulationTrace, asks_of
from tests.make_tiny_model import SPECIAL_TOKENS, VOCAB_SIZE
from tests.system.chaos import Chaos
from tests.system.client import Json, body
from tests.system.cluster import Cluster, NewCluster
from tests.system.load import Load, Outcome
from tests.system.prompts import Prompts
from tests.system.sampled import SAMPLED, SAMPLING
from tests.system.trace_load import run_trace
from tests.system.waiting import wait_for
from tests.system.worker_process import SETTLE_SECONDS, Metrics, WorkerProcess

NUM_BEFORE = 60
NUM_DURING = 40
MAX_TOKENS = 150
FIRST, STAYS, ENDS = "decode-0", "decode-1", "decode-2"
"""Drained by command, not drained, ended by SIGTERM."""
DECODES = (FIRST, STAYS, ENDS)
PREFILLS = ("prefill-0", "prefill-1")
LEASE_SECONDS = 10
"""As a cluster has it by default.  Five busy workers on few cores can renew a shorter lease too
late: then the one that stays is out of discovery while the others leave.
"""


@dataclass(frozen=True)
class Fleet:
    """Two prefill and three decode workers."""

    cluster: Cluster
    decodes: dict[str, WorkerProcess]


@pytest.fixture(scope="module")
def fleet_cluster(open_cluster: NewCluster) -> Iterator[Fleet]:
    with open_cluster("fleet") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        for role, names in (("prefill", PREFILLS), ("decode", DECODES)):
            for name in names:
                # one after the other: all at once they take longer to load
                cluster.add_worker(role, name).wait_ready()
        yield Fleet(cluster, {name: cluster.workers[name] for name in DECODES})


@pytest.fixture
def fleet(fleet_cluster: Fleet) -> Iterator[Fleet]:
    fleet_cluster.cluster.heal()
    for decode in fleet_cluster.decodes.values():
        wait_for(
            lambda decode=decode: decode.num_decode_peers() == 2,
            SETTLE_SECONDS,
            f"{decode.name} knows two decode peers",
        )
    yield fleet_cluster
    fleet_cluster.cluster.wait_settled()


async def test_drains_of_both_roles_cut_no_stream_and_change_no_token(fleet, prompts, reference):
    cluster, random, load = fleet.cluster, Random(0), Load(fleet.decodes, MAX_TOKENS)

    def ask(ingress: str) -> Outcome:
        return Outcome(
            prompts(random.randrange(20, 200)), ingress, random.choice(["auto", "local", "remote"])
        )

    before = [ask(name) for name in DECODES for _ in range(NUM_BEFORE // 3)]
    during = [ask(name) for name in (FIRST, STAYS) for _ in range(NUM_DURING // 2)]
    asking = asyncio.create_task(load.run(before))
    await load.wait_for(
        lambda: sum(outcome.num_tokens > 0 for outcome in load.outcomes) >= NUM_BEFORE // 2
    )
    with cluster.drained_by_command(FIRST, PREFILLS[0]):
        fleet.decodes[ENDS].terminate()
        # Some of these arrive before the workers have read their commands, some after.
        await asyncio.gather(asking, load.run(during))
        assert await asyncio.to_thread(fleet.decodes[ENDS].wait_end) == 0
        for name in (FIRST, PREFILLS[0]):
            await asyncio.to_thread(cluster.wait_state, name, "drained")
            assert cluster.workers[name].metrics().value("draining") == 0

    assert len(load.outcomes) == NUM_BEFORE + NUM_DURING
    assert [
        outcome for outcome in load.outcomes if not outcome.done or outcome.num_tokens != MAX_TOKENS
    ] == []
    again = Load({STAYS: fleet.decodes[STAYS]}, MAX_TOKENS)
    await again.run(Outcome(outcome.prompt, STAYS, "local") for outcome in load.outcomes)
    for drained, plain in zip(load.outcomes, again.outcomes, strict=True):
        assert drained.stream is not None
        assert plain.stream is not None
        # right too after a near tie, which the reference knows
        if drained.stream.tokens != plain.stream.tokens:
            reference.check(drained.prompt, drained.stream.tokens)
            reference.check(plain.prompt, plain.stream.tokens)


TRACE = SimulationTrace(
    num_requests=70,
    seconds=4.0,
    system_blocks=2,
    question=Length(40, 0.7, 200),
    output=Length(40, 0.8, 200),
    max_input_tokens=300,
)
TRACED: Json = {
    "offload": {"prefillLengthThreshold": 48},
    "moving": {"maxMoves": 8},
    "admission": {"workerWaitSeconds": 60},
}
"""The policy of the trace's workers: about half of its prompts go to prefill workers, and no number
of kills is too many.
"""


@pytest.fixture
def traced(fleet: Fleet) -> Iterator[WorkerProcess]:
    """A router before the fleet, which is then as it was before."""
    before = set(fleet.cluster.workers.values())
    router = fleet.cluster.add_worker("router", "router-0", start=False)
    router.write_policy(TRACED)
    router.start()
    for decode in fleet.decodes.values():
        decode.take_policy(TRACED)
    router.wait_ready()
    router.wait_for(
        lambda: router.num_decode_peers() == len(DECODES), "the router knows the decode workers"
    )
    yield router
    for worker in set(fleet.cluster.workers.values()) - before - {router}:
        worker.close()
        del fleet.cluster.workers[worker.name]
    fleet.cluster.wait_ready()
    router.terminate()
    assert router.wait_end() == 0
    for decode in fleet.decodes.values():
        decode.take_policy({})
    del fleet.cluster.workers[router.name]


async def test_trace_is_answered_once_while_workers_come_and_go(fleet, traced, reference):
    rows = TRACE.rows("0")
    needs_ping = asks_of(rows, TRACE.block_tokens, range(len(SPECIAL_TOKENS), VOCAB_SIZE), "0")
    chaos = Chaos(fleet.cluster, traced, TRACED, "0")
    steps = chaos.steps()
    begun = [asyncio.Event() for _ in (*steps, chaos.all_ready)]

    async def gate(index: int) -> None:
        # so that requests arrive during each step, and after the last
        await begun[index * len(begun) // len(needs_ping)].wait()

    trace = asyncio.create_task(
        run_trace(
            str(traced.client.http.base_url),
            needs_ping,
            [row.timestamp / 1000 for row in rows],
            gate,
        )
    )
    for event, step in zip(begun, steps, strict=False):
        event.set()
        await asyncio.to_thread(step)
    await asyncio.to_thread(chaos.all_ready)
    begun[-1].set()
    exchanges = await trace

    assert set(chaos.num_steps.values()) == {1}
    assert [fault for exchange in exchanges if (fault := exchange.fault())] == []
    for exchange in exchanges:
        reference.check_whole(list(exchange.ask.prompt), exchange.tokens)
    ids = [{chunk["id"] for chunk in exchange.chunks} for exchange in exchanges]
    metrics = traced.metrics()
    assert (len(set.union(*ids)), {len(each) for each in ids}) == (len(needs_ping), {1})
    assert traced.log.read_text().count("accepted request=") == len(needs_ping)
    assert sum(metrics.by_label("request_success_total", "finish_reason").values()) == len(
        needs_ping
    )
    assert sum(metrics.by_label("request_rejected_total", "reason").values()) == 0


def test_draining_ingress_relays_new_requests_and_goes_on_being_scraped(fleet, prompts, reference):
    first, others = fleet.decodes[FIRST], [fleet.decodes[STAYS], fleet.decodes[ENDS]]
    prompt, before = prompts(40), [worker.metrics() for worker in others]
    with first.client.stream(prompts(20), "local", max_tokens=1500) as own:
        own.read_tokens(1)
        with fleet.cluster.drained_by_command(FIRST):
            first.wait_for(lambda: _ready_reason(first) == "this worker is draining", "it says so")
            # Its own stream is open for as long as its engine is stopped.
            with (
                first.engine_stopped(),
                first.client.stream(prompt, "local", max_tokens=50) as relayed,
            ):
                relayed.read_tokens(1)
                scraped = first.client.http.get("/metrics")
                assert Metrics(scraped.text).value("draining") == 2  # a relayed stream holds it too
                tokens = relayed.read_all()
            assert (relayed.done, len(tokens), scraped.headers["connection"]) == (True, 50, "close")
            assert len(own.read_all()) == 1500
            assert own.done
            fleet.cluster.wait_state(FIRST, "drained")
            # a client that still uses a drained worker is served
            assert len(first.client.complete(prompts(30)).tokens) == 8
            first.wait_for(
                lambda: _ready_reason(first) == "this worker is drained", "it is drained again"
            )
    reference.check(prompt, tokens)
    first.wait_for(lambda: _tokens_made(others, before) == 50 + 8, "the others made the tokens")
    first.wait_ready()


@pytest.mark.parametrize("place", ["local", "remote"])
def test_every_kind_of_answer_is_the_same_over_a_draining_ingress(fleet, prompts, reference, place):
    first, prompt = fleet.decodes[FIRST], prompts(100)
    sampled = {**SAMPLED, "prefill": place}
    greedy = {"n": 2, "logprobs": 2, "max_tokens": 20, "prefill": place}
    with fleet.cluster.drained_by_command(FIRST):
        fleet.cluster.wait_state(FIRST, "drained")
        before = first.metrics()
        relayed = [first.client.complete(prompt, **fields) for fields in (sampled, greedy)]
        assert first.growth(before, "generation_tokens_total") == 0
    first.wait_ready()
    plain = [fleet.decodes[STAYS].client.complete(prompt, **fields) for fields in (sampled, greedy)]

    for one, other in zip(relayed, plain, strict=True):
        assert one.prefill == place
        assert (one.usage["prompt_tokens"], one.usage["completion_tokens"]) == (
            100,
            20 * len(one.choices),
        )
        for choice, same in zip(one.choices, other.choices, strict=True):
            assert choice.finish_reason == same.finish_reason
            if choice.tokens == same.tokens:
                assert choice.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    reference.check_sampled(prompt, plain[0].tokens, relayed[0].tokens, SAMPLING)
    for choice in relayed[1].choices:
        reference.check(prompt, choice.tokens)


def test_request_over_an_old_connection_is_answered_and_the_connection_closed(fleet, prompts):
    """As a gateway keeps them: the Service's change of mind does not reach them."""
    first = fleet.decodes[FIRST]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(httpx.Client(base_url=first.client.http.base_url, trust_env=False))
            for _ in range(3)
        ]
        for client in clients:
            assert "connection" not in client.get("/version").headers
        with fleet.cluster.drained_by_command(FIRST):
            fleet.cluster.wait_state(FIRST, "drained")
            for client in clients:
                reply = client.post("/v1/completions", json=body(prompts(20)))
                assert (reply.status_code, reply.headers["connection"]) == (httpx.codes.OK, "close")
    first.wait_ready()


def test_last_decode_worker_finishes_its_streams_and_names_another_way(fleet, prompts, reference):
    prompt, last = prompts(40), fleet.decodes[STAYS]
    with last.client.stream(prompt, "auto", max_tokens=1500) as stream:
        stream.read_tokens(1)
        with fleet.cluster.drained_by_command(*DECODES):
            reply = wait_for(
                lambda: _refusal(last, prompts), SETTLE_SECONDS, "no worker takes a request"
            )
            tokens = stream.read_all()

    assert reply is not None
    assert (
        reply.json()["error"]["code"],
        reply.headers["retry-after"],
        reply.headers["connection"],
    ) == ("draining", "1", "close")
    assert (stream.done, len(tokens)) == (True, 1500)
    reference.check(prompt, tokens[:200])
    for decode in fleet.decodes.values():
        decode.wait_ready()


def _refusal(worker: WorkerProcess, prompts: Prompts) -> httpx.Response | None:
    """The answer to a new request if that is a 503; None while a worker serves it."""
    reply = worker.client.post(body(prompts(5), max_tokens=1))
    return reply if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE else None


def _tokens_made(workers: list[WorkerProcess], since: list[Metrics]) -> float:
    return sum(
        worker.growth(before, "generation_tokens_total")
        for worker, before in zip(workers, since, strict=True)
    )


def _ready_reason(worker: WorkerProcess) -> str:
    """Reason why it is not ready; empty when it is."""
    return worker.client.http.get("/ready").json()["reason"] or ""
