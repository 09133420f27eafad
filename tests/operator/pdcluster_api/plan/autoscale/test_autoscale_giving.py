"""Sums instead of steps: what is given up, and which sizes a role passes, are those of going one worker at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.giving import given_up, roles_of
from pdcluster_api.plan.autoscale.pools import Pool, Vector, num_ready_left, trail
from pdcluster_api.plan.autoscale.values import PoolFacts

FEW = st.integers(0, 7)


@st.composite
def pools(draw: st.DrawFn) -> list[Pool]:
    found = []
    for role in ("prefill", "decode"):
        for order in range(draw(st.integers(1, 3))):
            replicas, low = draw(FEW), draw(st.integers(0, 3))
            ready, tops = draw(st.integers(0, replicas)), draw(st.tuples(FEW, FEW))
            facts = PoolFacts(
                role,
                "abc"[order],
                draw(st.sampled_from(["H100", "cpu"])),
                replicas,
                current=draw(FEW),
                ready=ready,
                ending=draw(st.integers(0, 2)),
                unschedulable_top=min(tops[0], replicas - ready),
                unready_top=min(tops[1], replicas - ready),
            )
            price, is_open = draw(st.sampled_from([1.0, 2.0])), draw(st.integers(0, 3)) > 0
            found.append(Pool(facts, order, price, low=low, high=low + draw(FEW), is_open=is_open))
    return found


def one_by_one(excess: int, among: Sequence[Pool], pools: Sequence[Pool], vector: Vector) -> dict[tuple[str, str], int]:
    """As `given_up`, each worker by itself."""
    left = dict(vector)
    for _ in range(excess):
        able = set()
        for mine in roles_of(pools):
            is_last, is_last_ready = sum(left[pool.key] for pool in mine) <= 1, num_ready_left(mine, left) == 1
            able |= {pool.key for pool in mine if left[pool.key] and not is_last and not (is_last_ready and costs_ready(pool, left))}
        donors = [pool for pool in among if pool.key in able]
        if not donors:
            break
        left[max(donors, key=lambda pool: order(pool, left)).key] -= 1
    return left


def costs_ready(pool: Pool, left: Vector) -> bool:
    return pool.ready_left(left[pool.key] - 1) < pool.ready_left(left[pool.key])


def order(pool: Pool, left: Vector) -> tuple[bool, bool, int, int, float, int]:
    above = left[pool.key] - pool.low
    return above > 0, not costs_ready(pool, left), above, left[pool.key], pool.price, pool.order


@settings(deadline=None)
@given(pools=pools(), data=st.data())
def test_what_is_given_up_is_what_is_given_one_by_one(pools: list[Pool], data: st.DataObject) -> None:
    vector = {pool.key: data.draw(FEW) for pool in pools}
    among = [pool for pool in pools if data.draw(st.booleans())]
    excess = data.draw(st.integers(-2, 40))

    assert given_up(excess, among, pools, vector) == one_by_one(excess, among, pools, vector)


def walked(pools: Sequence[Pool], base: Vector, room: Mapping[str, int], down_to: int, up_to: int) -> list[Vector]:
    """All vectors of a trail, made one worker at a time."""
    here = {pool.key: base[pool.key] for pool in pools}
    below, vector = list[Vector](), here
    dearest = sorted(pools, key=lambda pool: (pool.price, pool.order), reverse=True)
    tops = [(pool, pool.facts.replicas - pool.facts.unschedulable_top) for pool in dearest]
    for pool, limit in [*tops, *((pool, 0) for pool in dearest)]:
        while sum(vector.values()) > down_to and vector[pool.key] > max(pool.low, limit):
            vector = {**vector, pool.key: vector[pool.key] - 1}
            below.insert(0, vector)
    above, vector, left = list[Vector](), here, dict(room)
    for pool in sorted(pools, key=lambda pool: (pool.price, pool.order)):
        while sum(vector.values()) < up_to and pool.is_open and pool.clamp(vector[pool.key] + 1) == vector[pool.key] + 1:
            more = pool.held(vector[pool.key] + 1) - pool.held(vector[pool.key])
            if more and more > left.get(pool.facts.gpu, more):
                break
            left[pool.facts.gpu] = left.get(pool.facts.gpu, 99) - more
            vector = {**vector, pool.key: vector[pool.key] + 1}
            above.append(vector)
    return [*below, here, *above]


@settings(deadline=None)
@given(pools=pools(), data=st.data())
def test_a_trail_has_the_sizes_that_single_steps_pass(pools: list[Pool], data: st.DataObject) -> None:
    mine = [replace(pool, high=pool.high + 1) for pool in pools if pool.facts.role == "decode"]
    base = {pool.key: data.draw(FEW) for pool in mine}
    room = data.draw(st.dictionaries(st.sampled_from(["H100", "cpu"]), FEW))
    down_to, up_to = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 30))
    found = trail(mine, base, room, down_to=down_to, up_to=up_to)

    assert [found.at(size) for size in range(found.first, found.last + 1)] == walked(mine, base, room, down_to, up_to)
