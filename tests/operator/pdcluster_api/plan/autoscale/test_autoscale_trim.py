"""Workers that are given up where too many are asked for, against the rule in words for each
worker.
"""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.base import trim
from pdcluster_api.plan.autoscale.pools import ALL, WORKERS, Pool, Vector, by_role, num_ready_left
from tests.operator.pdcluster_api.plan.autoscale.pools_drawn import FEW, drawn_pools


def one_by_one(
    excess: int, among: Sequence[Pool], pools: Sequence[Pool], vector: Vector, *, of_workers: bool
) -> dict[tuple[str, str], int]:
    """As `trim`: among all that may give the first by the rule gives one, and so on; then the last
    that gave takes one back if there is that much too little, and so on.
    """
    left, gave = dict(vector), list[Pool]()

    def cost(pool: Pool) -> int:
        return 1 if of_workers else pool.facts.gpus_per_replica

    while excess > 0:
        able = set()
        for mine in by_role(pools).values():
            is_last, is_last_ready = (
                sum(left[pool.key] for pool in mine) <= 1,
                num_ready_left(mine, left) == 1,
            )
            able |= {
                pool.key
                for pool in mine
                if left[pool.key]
                and not is_last
                and not (is_last_ready and costs_ready(pool, left))
            }
        donors = [pool for pool in among if pool.key in able]
        if not donors:
            break
        donor = max(donors, key=lambda pool: order(pool, left))
        left[donor.key] -= 1
        gave.append(donor)
        excess -= cost(donor)
    for donor in gave[::-1]:
        if excess + cost(donor) <= 0:
            left[donor.key] += 1
            excess += cost(donor)
    return left


def costs_ready(pool: Pool, left: Vector) -> bool:
    return pool.ready_left(left[pool.key] - 1) < pool.ready_left(left[pool.key])


def order(pool: Pool, left: Vector) -> tuple[bool, bool, int, int, float, int]:
    above = left[pool.key] - pool.low
    return above > 0, not costs_ready(pool, left), above, left[pool.key], pool.price, pool.order


@settings(deadline=None)
@given(pools=drawn_pools(), data=st.data())
def test_what_is_given_up_is_what_is_given_one_by_one(
    pools: list[Pool], data: st.DataObject
) -> None:
    vector = {pool.key: data.draw(FEW) for pool in pools}
    limit = data.draw(st.sampled_from([ALL, WORKERS, "H100", "cpu"]))
    among = [pool for pool in pools if limit in (ALL, WORKERS, pool.facts.gpu)]
    excess = data.draw(st.integers(-2, 40))

    assert trim(excess, limit, pools, vector) == one_by_one(
        excess, among, pools, vector, of_workers=limit == WORKERS
    )
