"""The allocation loop: every worker that it moves, one after the other, and what stops it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.allocate import Allocation
from pdcluster_api.plan.autoscale.pools import ALL, Band, Budget, Pool, Vector, capacity
from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_schema.workload import PoolKey
from tests.operator.pdcluster_api.plan.autoscale.pools_drawn import FEW, drawn_pools

PLENTY = {"prefill": 100, "decode": 100}


def pool(name: str, size: int, **fields: Any) -> Pool:
    """A pool by `role/name`, all of its workers ready.  fields: of Pool, or of its facts."""
    role, _, of = name.partition("/")
    facts = {
        key: fields.pop(key)
        for key in ("gpu", "ending", "unschedulable_top", "gpus_per_replica")
        if key in fields
    }
    ready = size - facts.get("unschedulable_top", 0)
    number = size + facts.get("ending", 0)
    return Pool(
        PoolFacts(
            role,
            of,
            **{"gpu": "H100", "replicas": size, "current": number, "ready": ready, **facts},
        ),
        **{"order": 0, **fields},
    )


def allocated(
    *pools: Pool,
    to: Mapping[str, int],
    band: Band | None = None,
    caps: Mapping[str, int] | None = None,
    **limits: int,
) -> Allocation:
    """The loop from the sizes that pools have.  limits: by GPU type, `total` of all together."""
    base = {each.key: each.facts.replicas for each in pools}
    found = Allocation(
        pools,
        base,
        Budget({ALL if gpu == "total" else gpu: number for gpu, number in limits.items()}),
        band,
    )
    found.approach(to, PLENTY if caps is None else caps)
    return found


def moves(*pools: Pool, **given: Any) -> list[str]:
    return [f"{each.name} {by:+}" for each, by in allocated(*pools, **given).moves]


CHEAP = pool("prefill/cheap", 2, price=1.0, high=4)
DEAR = pool("prefill/dear", 2, price=3.0, order=1)


def test_the_role_that_misses_the_greater_part_has_the_next_turn():
    prefill, decode = pool("prefill/x", 4), pool("decode/x", 4)

    assert moves(prefill, decode, to={"prefill": 6, "decode": 5}) == [
        "prefill/x +1",
        "decode/x +1",
        "prefill/x +1",
    ]
    assert moves(prefill, decode, to={"prefill": 6, "decode": 5}, total=9) == ["prefill/x +1"]


def test_a_type_that_is_used_up_leaves_the_rest_of_the_budget_to_others():
    prefill, decode = pool("prefill/x", 1), pool("decode/x", 1, gpu="B300")

    assert moves(prefill, decode, to={"prefill": 3, "decode": 3}, H100=2, total=5) == [
        "prefill/x +1",
        "decode/x +1",
        "decode/x +1",
    ]


def test_what_is_taken_back_is_what_was_given_up():
    """And not a worker of a cheaper pool, which would make two pods move for nothing."""
    decode = pool("decode/x", 4)

    assert moves(CHEAP, DEAR, decode, to={"prefill": 3, "decode": 4}, band=Band(least=1.0)) == [
        "prefill/dear -1",
        "prefill/dear +1",
    ]


def test_what_was_given_up_is_not_taken_back_where_another_has_its_room():
    """Decode has pods that end, so that its growth holds no more accelerators."""
    prefill, decode, least = pool("prefill/x", 2), pool("decode/x", 1, ending=6), Band(least=1.0)

    assert moves(prefill, decode, to={"prefill": 1, "decode": 4}, band=least, total=3) == [
        "prefill/x -1"
    ]
    assert moves(prefill, decode, to={"prefill": 1, "decode": 4}, band=least, total=4) == [
        "prefill/x -1",
        "decode/x +1",
        "prefill/x +1",
    ]


def test_no_fleet_climbs_for_a_band_that_whole_workers_cannot_meet():
    """2 x 2.27 over 4 is 1.14, over 5 0.91: one more decode worker is nearer, and all else only
    more.
    """
    prefill, decode, one = (
        pool("prefill/x", 2, weight=2.2738757),
        pool("decode/x", 4),
        Band(1.0, 1.0),
    )
    first = allocated(
        prefill,
        decode,
        to={"prefill": 2, "decode": 4},
        band=one,
        caps={"prefill": 10, "decode": 13},
    )
    again = allocated(
        prefill,
        pool("decode/x", 5),
        to={"prefill": 2, "decode": 5},
        band=one,
        caps={"prefill": 11, "decode": 14},
    )

    assert (first.counts, first.distance() > 0.0) == ({"prefill": 2, "decode": 5}, True)
    assert again.moves == []


def walked(
    pools: Sequence[Pool], base: Vector, room: Mapping[str, int], down_to: int, up_to: int
) -> list[Vector]:
    """All vectors of a role from the smallest size to the greatest, by the rule of its pools in
    words.
    """
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
        while (
            sum(vector.values()) < up_to
            and pool.is_open
            and pool.clamp(vector[pool.key] + 1) == vector[pool.key] + 1
        ):
            more = (
                pool.facts.held(vector[pool.key] + 1).accelerators
                - pool.facts.held(vector[pool.key]).accelerators
            )
            if more and more > left.get(pool.facts.gpu, more):
                break
            left[pool.facts.gpu] = left.get(pool.facts.gpu, 999) - more
            vector = {**vector, pool.key: vector[pool.key] + 1}
            above.append(vector)
    return [*below, here, *above]


@settings(deadline=None)
@given(pools=drawn_pools(), data=st.data())
def test_a_role_gives_takes_back_and_takes_worker_by_worker(
    pools: list[Pool], data: st.DataObject
) -> None:
    mine = [replace(pool, high=pool.high + 1) for pool in pools if pool.role == "decode"]
    base = {pool.key: pool.facts.replicas for pool in mine}
    room = data.draw(st.dictionaries(st.sampled_from(["H100", "cpu"]), FEW))
    down_to, up_to = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 30))
    held = Budget().held(mine, base)
    loop = Allocation(mine, base, Budget({gpu: held[gpu] + free for gpu, free in room.items()}))
    vectors = [dict(base)]
    while loop.counts["decode"] > down_to and loop.shrink("decode"):
        vectors.insert(0, dict(loop.sizes))
    for vector in vectors[1:]:
        assert loop.grow("decode")
        assert loop.sizes == vector
    while loop.counts["decode"] < up_to and loop.grow("decode"):
        vectors.append(dict(loop.sizes))

    assert vectors == walked(mine, base, room, down_to, up_to)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[Pool], dict[str, int], Band]:
    """Two roles of up to two pools each, recommendations that their bounds allow, and a band."""
    pools, recommendations = list[Pool](), dict[str, int]()
    for role in ("prefill", "decode"):
        for order in range(draw(st.integers(1, 2))):
            size = draw(st.integers(0, 4))
            weight = draw(st.sampled_from([1.0, 1.5, 2.25]))
            pools.append(
                replace(
                    pool(f"{role}/p{order}", size),
                    order=order,
                    weight=weight,
                    high=size + draw(st.integers(0, 3)),
                )
            )
        mine = [each for each in pools if each.role == role]
        size = sum(each.facts.replicas for each in mine)
        recommendations[role] = draw(st.integers(max(0, size - 2), sum(each.high for each in mine)))
    low = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    return pools, recommendations, Band(low, draw(st.sampled_from([low or 0.4, 2.0, float("inf")])))


@settings(deadline=None)
@given(drawn=pairs(), more=st.integers(0, 10))
def test_the_band_is_met_where_it_can_be_and_then_the_least_is_missed(
    drawn: tuple[list[Pool], dict[str, int], Band], more: int
) -> None:
    """Beside a look at every pair of sizes from the smaller of recommended and present ones on."""
    pools, recommendations, band = drawn
    base = {each.key: each.facts.replicas for each in pools}
    total = sum(base.values()) + more
    vectors = {
        role: walked([each for each in pools if each.role == role], base, {}, recommended, 99)
        for role, recommended in recommendations.items()
    }

    def distance(vector: Vector) -> float:
        return band.distance(*(capacity(role, pools, vector) for role in ("prefill", "decode")))

    def unmet(vector: Mapping[PoolKey, int]) -> float:
        counts = {
            role: sum(size for (of, _), size in vector.items() if of == role)
            for role in recommendations
        }
        return max(
            (recommended - counts[role]) / max(1, recommended)
            for role, recommended in recommendations.items()
        )

    every = [{**one, **other} for one, other in product(vectors["prefill"], vectors["decode"])]
    possible = [vector for vector in every if Budget().held(pools, vector)[ALL] <= total]
    found = allocated(*pools, to=recommendations, band=band, total=total)

    assert found.sizes in possible
    assert (found.distance() == 0.0) == (min(map(distance, possible)) == 0.0)
    assert found.distance() <= distance(base)
    if found.distance() == 0.0:
        assert max(0.0, unmet(found.sizes)) == max(
            0.0, min(unmet(vector) for vector in possible if distance(vector) == 0.0)
        )
