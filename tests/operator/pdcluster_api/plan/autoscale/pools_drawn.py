"""Strategies of small pools of both roles, with workers that start, wait and end."""

from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.pools import Pool
from pdcluster_api.plan.autoscale.values import PoolFacts

FEW = st.integers(0, 7)


@st.composite
def drawn_pools(draw: st.DrawFn) -> list[Pool]:
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
                gpus_per_replica=draw(st.sampled_from([1, 2, 4, 8])),
            )
            price, is_open = draw(st.sampled_from([1.0, 2.0])), draw(st.integers(0, 3)) > 0
            found.append(Pool(facts, order, price, low=low, high=low + draw(FEW), is_open=is_open))
    return found
