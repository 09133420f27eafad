"""A replay as a CSV file: a row for each interval."""

import csv
from collections.abc import Iterator, Sequence
from typing import TextIO

from pdcluster_api.plan.autoscale.explain import summary
from pdctl.replay.run import Moment

_PLAIN = (
    "seconds",
    "requests_per_second",
    "input_tokens",
    "output_tokens",
    "prefill_demand_workers",
    "decode_demand_workers",
    "prefill_queue_requests",
    "prefill_busy_ratio",
    "num_requests_waiting",
    "kv_cache_usage_ratio",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
)


def write_table(moments: Sequence[Moment], file: TextIO) -> None:
    pools = list(moments[0].pools)
    writer = csv.writer(file, lineterminator="\n")
    of_pools = [
        f"{role}/{pool} {name}"
        for role, pool in pools
        for name in ("replicas", "ready", "draining")
    ]
    writer.writerow([*_PLAIN, *of_pools, "decision", "problems"])
    writer.writerows(_rows(moments))


def _rows(moments: Sequence[Moment]) -> Iterator[list[str]]:
    for moment in moments:
        load = moment.load
        numbers = (
            load.seconds,
            load.requests_per_second,
            load.input_tokens,
            load.output_tokens,
            moment.demand["prefill"],
            moment.demand["decode"],
            moment.prefill_queue_requests,
            moment.engine_busy_ratio,
            moment.num_requests_waiting,
            moment.kv_cache_usage_ratio,
            moment.ttft_seconds,
            moment.tpot_seconds,
        )
        sizes = [
            str(number)
            for pool in moment.pools.values()
            for number in (pool.replicas, pool.ready, pool.draining)
        ]
        decision = "" if moment.record is None else summary(moment.record)
        yield [
            *("" if number is None else f"{number:.6g}" for number in numbers),
            *sizes,
            decision,
            " ".join(moment.problems),
        ]
