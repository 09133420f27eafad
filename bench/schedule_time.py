"""Milliseconds that each scheduler takes to plan a step of 256 requests, without engine and model.

    bench/schedule_time.py [--requests 256] [--steps 300]

`decodes`: all of them decode.  `crowded`: one place less, beside an unfinished prompt, with
64 more requests that wait, so that admission is looked at in every step.
"""

import argparse
import gc
import statistics
import time

from pdcluster_schema.ports import SchedulerName
from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest, Scheduled
from pdcluster_worker.engine.scheduler.base import Scheduler, is_decode
from pdcluster_worker.engine.scheduler.policies import SCHEDULERS, make_scheduler
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerSettings
from pdcluster_worker.messages.requests import SamplingParams

CONTEXT, LONG_PROMPT, NUM_WAITING = 300, 200_000, 64
WEIGHTS = bytearray(64 << 20)
"""Read between two steps, as a model's are, so that caches are cold."""


def main() -> None:
    """Print a row for each scheduler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print(
        f"| schedule() of {options.requests}, ms: median, p99 | decodes | crowded |\n|---|---|---|"
    )
    for name in SCHEDULERS:
        cells = [
            measure(name, options.requests, options.steps, crowded) for crowded in (False, True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def measure(name: SchedulerName, num_requests: int, num_steps: int, crowded: bool) -> str:
    """Median and p99 of `num_steps` steps, in milliseconds."""
    settings = EngineSettings(
        block_size=16,
        num_blocks=60_000,
        max_batched_tokens=1 << 19,
        max_sequences=num_requests,
        max_model_len=1 << 19,
        prefix_caching=False,
        scheduler=SchedulerSettings(name=name),
    )
    tables = BlockTables(settings, BlockPool(settings.num_blocks))
    scheduler = make_scheduler(settings, tables)
    for number in range(num_requests - crowded):
        scheduler.add_ready(decoding(tables, number))
    if crowded:
        scheduler.add(
            EngineRequest("long", [1] * LONG_PROMPT, LONG_PROMPT, sampling(), arrival_seconds=1e3)
        )
        scheduler.schedule()
        for number in range(NUM_WAITING):
            scheduler.add(
                EngineRequest(f"w{number}", [1] * CONTEXT, CONTEXT, sampling(), arrival_seconds=1e4)
            )
    gc.collect()
    gc.freeze()
    taken = [timed(scheduler, tables) for _ in range(num_steps)]
    late = sorted(taken)[num_steps * 99 // 100]
    return f"{statistics.median(taken):.2f}, {late:.2f}"


def decoding(tables: BlockTables, number: int) -> EngineRequest:
    """A request past its prefill, of about CONTEXT tokens, with blocks for them."""
    length = CONTEXT + number % 16
    request = EngineRequest(
        f"r{number}", [1] * length, length - 1, sampling(), arrival_seconds=float(number)
    )
    tables.take(request, tables.reservation(request, length))
    request.num_computed_tokens = length - 1
    return request


def sampling() -> SamplingParams:
    """Sampling of a request that ends after this bench."""
    return SamplingParams(max_tokens=4000, seed=0)


def timed(scheduler: Scheduler, tables: BlockTables) -> float:
    """Milliseconds of one schedule, whose decodes then get their tokens; a long prompt stays where
    it is.
    """
    WEIGHTS.count(1)
    start = time.perf_counter()
    step = scheduler.schedule()
    taken = (time.perf_counter() - start) * 1e3
    for item in step.items.values():
        advance(item, tables)
    return taken


def advance(item: Scheduled, tables: BlockTables) -> None:
    """As if the step had run, but for prefills: the next step is as this one."""
    if is_decode(item.request):
        tables.advance(item.request, 1)
        item.request.tokens.append(1)


if __name__ == "__main__":
    main()
