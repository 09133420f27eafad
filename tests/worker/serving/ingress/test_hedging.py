"""A request that runs on two workers until its first token: the winner, what the loser leaves, and
cases without a race [O8].
"""

import asyncio
import doctest

import pytest

from pdcluster_schema.routing import RacingSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.routing import attempts
from pdcluster_worker.serving.ingress import attempt
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing import request_trace
from tests.worker.serving.doubles import ScriptedEngine, totals, until
from tests.worker.serving.ingress.ingresses import make_ingress
from tests.worker.serving.ingress.moving_model import (
    WHOLE,
    Model,
    collect,
    counted,
    ids,
    model_here,
    spec,
    two_peers,
)

ALWAYS = RacingSpec(enabled=True, max_requests=1, max_ratio=1.0)


def ingress_of(
    worker: WorkerContext, engine: ScriptedEngine, *peers: Model, policy: RacingSpec = ALWAYS
) -> Ingress:
    worker.policy = worker.policy.model_copy(update={"racing": policy})
    ingress = make_ingress(worker, engine, *peers)
    engine.answer = model_here
    ingress._local._num_decoding = 3
    return ingress


def two(first_waits: bool = False, rival_waits: bool = False) -> tuple[Model, Model]:
    """Idle workers, of which the first is chosen; one that waits makes no token yet."""
    first, rival = two_peers()
    first.waits_at, rival.waits_at = 0 if first_waits else None, 0 if rival_waits else None
    return first, rival


def raced(worker: WorkerContext) -> dict[str, float]:
    return totals(worker.metrics.races, "winner")


@pytest.mark.parametrize("winner", ["first", "rival"])
async def test_race_is_won_by_the_first_token_and_the_loser_is_closed(worker, engine, winner):
    first, rival = two(first_waits=winner == "rival", rival_waits=winner == "first")
    with request_trace.begin_trace("r") as told:
        made = await collect(ingress_of(worker, engine, first, rival))

    assert ids(made) == WHOLE
    assert {g.token.request_id for g in made} == {"r"}
    assert sorted(first.requested + rival.requested) == ["r", "r~1"]  # one set of blocks each
    assert (first.num_open, rival.num_open, raced(worker)) == (0, 0, {winner: 1})
    assert worker.metrics.race_wasted_tokens._value.get() == 3
    facts = {event.name: event.facts for event in told.events}
    assert (facts["race"], facts["race_won"]) == ({"first": "a", "rival": "b"}, {"by": winner})


async def test_race_that_an_entrant_leaves_goes_to_the_other(worker, engine):
    first, rival = two()
    first.ends_after = 0

    assert ids(await collect(ingress_of(worker, engine, first, rival))) == WHOLE
    assert (raced(worker), counted(worker)) == ({"rival": 1}, {})


async def test_race_that_neither_wins_is_tried_again_elsewhere(worker, engine):
    first, rival = two()
    first.ends_after = rival.ends_after = 0

    assert ids(await collect(ingress_of(worker, engine, first, rival))) == WHOLE
    assert (raced(worker), len(first.requested), len(rival.requested), len(engine.inputs)) == (
        {"none": 1},
        1,
        1,
        1,
    )


async def test_race_of_a_request_that_is_at_fault_ends_as_it_would(worker, engine):
    first, rival = two()
    for peer in (first, rival):
        peer.ends_after, peer.error = 0, RequestError("bad", status=400)
    with pytest.raises(RequestError, match="bad"):
        await collect(ingress_of(worker, engine, first, rival))

    assert (worker.active, engine.inputs) == (0, [])


async def test_entrant_that_failed_is_taken_again_when_the_winner_is_lost(worker, engine):
    first, rival = two(first_waits=True)
    rival.ends_after, first.ends_after = 0, 2
    requested = asyncio.create_task(collect(ingress_of(worker, engine, first, rival)))
    await until(lambda: len(rival.requested) == 1 and rival.num_open == 0)
    rival.ends_after = 99
    first.goes_on.set()

    assert ids(await requested) == WHOLE
    assert (rival.outputs, engine.inputs) == ([[], [10, 11]], [])


async def test_winner_that_preempts_goes_on_where_no_worker_has_room(worker, engine):
    first, rival = two(rival_waits=True)
    first.ends_after, first.error = 2, RequestError("preempted", status=503, code="out_of_blocks")
    ingress = ingress_of(worker, engine, first, rival)

    assert ids(await collect(ingress)) == WHOLE
    assert ([len(output) for output in first.outputs], engine.inputs) == ([0, 2, 4], [])


async def test_race_that_its_client_leaves_closes_both(worker, engine):
    first, rival = two(first_waits=True, rival_waits=True)
    requested = asyncio.create_task(collect(ingress_of(worker, engine, first, rival)))
    await until(lambda: first.num_open + rival.num_open == 2)
    requested.cancel()
    await asyncio.gather(requested, return_exceptions=True)

    assert (first.num_open, rival.num_open, worker.active) == (0, 0, 0)


async def test_race_may_be_run_here(worker, engine):
    first = Model("a")
    first.waits_at = 0
    ingress = ingress_of(worker, engine, first)
    ingress._local._num_decoding = 0

    assert ids(await collect(ingress)) == WHOLE
    assert raced(worker) == {"first": 1}  # this worker, which wins ties
    assert (first.requested, first.num_open) == (["r~1"], 0)


@pytest.mark.parametrize(
    "policy",
    [
        RacingSpec(),
        RacingSpec(enabled=True, max_requests=0, max_ratio=1.0),
        RacingSpec(enabled=True, max_requests=9, max_ratio=0.4),
    ],
    ids=["off", "busy", "share"],
)
async def test_request_does_not_race(worker, engine, policy):
    first, rival = two()

    assert ids(await collect(ingress_of(worker, engine, first, rival, policy=policy))) == WHOLE
    assert (rival.requested, raced(worker)) == ([], {})


async def test_share_of_the_requests_that_race_is_bounded(worker, engine):
    first, rival = two()
    ingress = ingress_of(
        worker,
        engine,
        first,
        rival,
        policy=RacingSpec(enabled=True, max_requests=1, max_ratio=0.25),
    )
    for count in range(8):
        await collect(ingress, spec(f"r{count}"))

    assert sum(raced(worker).values()) == 2


@pytest.mark.parametrize("module", [attempts, attempt], ids=["attempts", "course"])
def test_rules_are_as_their_examples_say(module):
    result = doctest.testmod(module)

    assert (result.attempted > 0, result.failed) == (True, 0)
