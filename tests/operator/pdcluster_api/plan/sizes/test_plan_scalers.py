"""Choice of a pool's size: every case of scaler, recorded `replicas` and bounds."""

import pytest

from pdcluster_api.plan.observed.state import ScalerState
from pdcluster_api.plan.sizes import plan_scaler, pool_sizes
from tests.operator.pdcluster_api.plan.clusters import identity, make_cluster, pool, workload


def size_of(declared, scaler=None, live=None):
    spec = make_cluster(decode=[declared]).spec
    scalers = [] if scaler is None else [ScalerState("decode", "cpu", *scaler)]
    sizes = pool_sizes(spec, scalers, {} if live is None else {("decode", "cpu"): live})
    return next(size for size in sizes if size.role == "decode")


@pytest.mark.parametrize(
    ("scaler", "live", "desired", "request_"),
    [
        (None, None, 2, 2),  # new: the pool's replicas seed it
        (None, 5, 5, 5),  # lost: what runs seeds it
        (None, 9, 6, 6),  # lost, and the StatefulSet was scaled by hand: within the bounds
        (None, 0, 1, 1),
        ((4, 2), 2, 4, None),  # scaled: the file is unchanged, and is no request
        ((4, 3), 4, 2, 2),  # the file changed: a request like any other
        ((4, None), 4, 4, 4),  # its mark is lost: the scale stays, the mark is written
        ((2, 2), 2, 2, None),
        ((2, 1), 2, 2, 2),  # changed to what is there already: the mark is still to be written
        ((9, 2), 2, 6, None),  # more than max: what was asked for stays in the scaler
        ((0, 2), 2, 1, None),
    ],
)
def test_size_of_a_pool(scaler, live, desired, request_):
    size = size_of(pool(2, minReplicas=1, maxReplicas=6), scaler, live)
    assert (size.desired, size.request) == (desired, request_)


def test_no_bounds_mean_any_size_and_zero():
    assert size_of(pool(0), (0, 0)).desired == 0
    assert size_of(pool(2), (500, 2)).desired == 500
    assert size_of(pool(2), (0, 2)).desired == 0


def test_a_clamped_size_names_the_request_and_the_limit():
    bounded = pool(2, minReplicas=1, maxReplicas=6)
    assert [bool(size_of(bounded, (number, 2)).note) for number in (9, 0, 6)] == [True, True, False]


def test_a_scaler_asks_in_vain_for_more_than_a_pool_may_have():
    """It was written under an older CRD: the API server takes no such number any more, neither from
    us.
    """
    most = 2**31 - 1

    assert size_of(pool(2), (most, 2)).desired == 1024
    assert (size_of(pool(2), (most, None)).desired, size_of(pool(2), (most, None)).request) == (
        1024,
        1024,
    )
    assert (size_of(pool(2), None, most).desired, size_of(pool(2), None, most).request) == (
        1024,
        1024,
    )


def test_pools_have_no_more_together_than_an_object_may_have():
    names = [f"p{number}" for number in range(7)]
    spec = make_cluster(
        decode=[*(pool(1, name) for name in names[:6]), pool(900, "p6", minReplicas=900)]
    ).spec
    scalers = [
        ScalerState("decode", name, 900 if name == "p6" else 1024, 900 if name == "p6" else 1)
        for name in names
    ]
    sizes = {
        size.pool.name: size for size in pool_sizes(spec, scalers, {}) if size.role == "decode"
    }

    assert {name: size.desired for name, size in sizes.items()} == {
        **dict.fromkeys(names[:6], 532),
        "p6": 900,
    }
    assert (
        sum(size.desired for size in sizes.values()) + 1
        <= 4096
        < sum(size.desired for size in sizes.values()) + 1 + 6
    )
    assert sizes["p6"].note is None


def test_a_scaler_of_another_pool_or_role_counts_for_nothing():
    sizes = pool_sizes(
        make_cluster().spec,
        [ScalerState("decode", "gone", 7, 7), ScalerState("mixed", "cpu", 7, 7)],
        {},
    )
    assert [(size.key, size.desired) for size in sizes] == [
        (("prefill", "cpu"), 1),
        (("decode", "cpu"), 2),
    ]


def test_scaler_status_counts_the_pods_of_one_revision():
    size = size_of(pool(2), (2, 2))
    plan = plan_scaler("chat", size, workload(identity("aaaa"), 2, current=3), "bbbb")
    assert plan.status == {
        "replicas": 3,
        "selector": "pdcluster.io/cluster=chat,pdcluster.io/role=decode,"
        "pdcluster.io/pool=cpu,pdcluster.io/revision=aaaa",
    }
    assert plan.seen == 2
