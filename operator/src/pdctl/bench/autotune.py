"""`pdctl bench autotune`: runs the trials that `tuning` asks for on a real cluster under load.

A cluster is started once for consecutive trials of the same sizes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from pdcluster_api.errors import StartError
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDCluster
from pdctl.bench.datasets import DatasetSampling, Lengths, random_requests
from pdctl.bench.load import (
    REQUEST_LIMIT_SECONDS,
    Arrivals,
    LoadResult,
    LoadTarget,
    percentile,
    poisson_arrivals,
    run_load,
)
from pdctl.bench.measure import LocalCluster, started_cluster, warm_up
from pdctl.bench.openai import OpenAIServer, http_session
from pdctl.bench.tuning import (
    LatencyTargets,
    SearchResult,
    Sizes,
    Trial,
    TrialResult,
    front,
    search,
)

FIELDS = {
    "maxBatchedTokens": "max_batched_tokens",
    "maxSequences": "max_sequences",
    "scheduler": "scheduler",
    "tbtSloMilliseconds": "tbt_slo_milliseconds",
}
"""Fields of `spec.engine` that are changed: their names in the object, and in EngineSpec."""

TBT_SHARE = 0.8
"""Share of the ITL limit as sarathi's target for a step: p99 at a client lies above what steps are
held to.
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    local: LocalCluster
    limits: LatencyTargets
    lengths: Lengths
    num_prompts: int
    rate: float
    max_trials: int
    vocab_size: int
    seed: str
    request_limit_seconds: float = REQUEST_LIMIT_SECONDS


def start_sizes(cluster: PDCluster) -> Sizes:
    """Raises InvalidObjectError where a role has sizes of its own: they override `spec.engine`."""
    faults = [
        Fault(
            f"spec.roles.{role}.engine.{field}",
            "goes over spec.engine's, which autotune changes",
            "leave it out, and write the result to the role yourself",
        )
        for role, declared in cluster.spec.roles.present().items()
        for field, name in FIELDS.items()
        if declared.engine is not None and name in declared.engine.model_fields_set
    ]
    if faults:
        raise InvalidObjectError(faults)
    engine = cluster.spec.engine
    return Sizes(engine.max_batched_tokens, engine.max_sequences, engine.scheduler)


def engine_values(sizes: Sizes, limits: LatencyTargets) -> dict[str, Any]:
    slo = round(TBT_SHARE * limits.itl_p99_ms, 3) if sizes.scheduler == "sarathi" else None
    return {
        "maxBatchedTokens": sizes.max_batched_tokens,
        "maxSequences": sizes.max_sequences,
        "scheduler": sizes.scheduler,
        "tbtSloMilliseconds": slo,
    }


async def autotune(
    tuning: Tuning, start: Sizes, echo: Callable[[str], None], on_end: Callable[[], None]
) -> SearchResult:
    """echo: gets a line for each trial.  on_end: called after each answer.

    Raises StartError when the first cluster does not start.
    """
    steps = search(start, tuning.rate, tuning.limits, tuning.max_trials)
    async with AsyncExitStack() as stack:
        target: LoadTarget | None = None
        up: Sizes | None = None
        trial, number = next(steps), 1
        while True:
            try:
                if trial.sizes != up or target is None:
                    await stack.aclose()
                    up, target = trial.sizes, None
                    target = await _start(tuning, trial.sizes, stack)
                result = result_of(await _load(tuning, target, trial, number, on_end))
            except StartError as e:
                if number == 1:
                    raise
                echo(str(e))  # these sizes do not run here; others did
                result = TrialResult(math.inf, math.inf, tuning.num_prompts)
            echo(trial_line(number, trial, result, tuning.limits))
            try:
                trial = steps.send(result)
            except StopIteration as e:
                found: SearchResult = e.value
                return found
            number += 1


async def _start(tuning: Tuning, sizes: Sizes, stack: AsyncExitStack) -> LoadTarget:
    local = tuning.local
    engine = engine_values(sizes, tuning.limits)
    cluster = await stack.enter_async_context(started_cluster(local.file, local.model, engine))
    session = await stack.enter_async_context(http_session())
    target = OpenAIServer(session, cluster.base_url, cluster.model)
    seed = f"{tuning.seed} warm-up {sizes}"
    requests = random_requests(2, tuning.lengths, tuning.vocab_size, seed, DatasetSampling())
    await warm_up(target, requests, tuning.request_limit_seconds)
    return target


async def _load(
    tuning: Tuning, target: LoadTarget, trial: Trial, number: int, on_end: Callable[[], None]
) -> LoadResult:
    seed = f"{tuning.seed} {number}"
    requests = random_requests(
        tuning.num_prompts, tuning.lengths, tuning.vocab_size, seed, DatasetSampling()
    )
    arrivals = poisson_arrivals(trial.rate, len(requests), seed)
    schedule = Arrivals(arrivals, limit_seconds=tuning.request_limit_seconds)
    return await run_load(target, requests, schedule, on_end)


def result_of(run: LoadResult) -> TrialResult:
    """Raises StartError when no answer was complete."""
    latencies = run.latencies_seconds
    if not latencies["ttft"]:
        raise StartError(f"no answer was complete, the first: {run.failures[0]}", exit_code=1)
    gaps = latencies["itl"] or [0.0]  # answers of one token have none
    return TrialResult(
        1e3 * percentile(latencies["ttft"], 90), 1e3 * percentile(gaps, 99), len(run.failures)
    )


def trial_line(number: int, trial: Trial, result: TrialResult, limits: LatencyTargets) -> str:
    sizes = trial.sizes
    verdict = "inside the limits" if result.meets(limits) else "over"
    failed = f", {result.num_failed} failed" if result.num_failed else ""
    return (
        f"trial {number}: maxBatchedTokens {sizes.max_batched_tokens}, "
        f"maxSequences {sizes.max_sequences}, {sizes.scheduler}, {trial.rate:.3g} requests/s: "
        f"TTFT p90 {result.ttft_p90_ms:.0f} ms, ITL p99 {result.itl_p99_ms:.0f} ms"
        f"{failed}: {verdict}"
    )


def trial_rows(found: SearchResult, limits: LatencyTargets) -> Iterator[tuple[str, ...]]:
    """A header, and the trials from the lowest request rate to the highest."""
    header = ("REQUESTS/S", "TTFT P90 MS", "ITL P99 MS", "TOKENS", "SEQUENCES", "SCHEDULER")
    yield (*header, "LIMITS", "FRONT OF")
    fronts = front(found.tried)
    for one in sorted(found.tried, key=lambda one: one.trial.rate):
        sizes, result = one.trial.sizes, one.result
        verdict = "best" if one is found.best else "inside" if result.meets(limits) else "over"
        latencies = (result.ttft_p90_ms, result.itl_p99_ms)
        yield (
            f"{one.trial.rate:.3g}",
            *("-" if math.isinf(ms) else f"{ms:.0f}" for ms in latencies),
            *(str(sizes.max_batched_tokens), str(sizes.max_sequences), sizes.scheduler),
            *(verdict, ", ".join(fronts[one])),
        )


def result_text(found: SearchResult, limits: LatencyTargets) -> str:
    if found.best is None:
        near = found.closest(limits)
        return (
            f"no trial was inside TTFT p90 {limits.ttft_p90_ms:g} ms and ITL p99 "
            f"{limits.itl_p99_ms:g} ms; the closest: {near.result.ttft_p90_ms:.0f} ms and "
            f"{near.result.itl_p99_ms:.0f} ms at {near.trial.rate:.3g} requests/s; "
            "raise a limit, lower --request-rate, or send shorter requests"
        )
    result = found.best.result
    values = engine_values(found.best.trial.sizes, limits).items()
    lines = [f"    {field}: {value}" for field, value in values if value is not None]
    return "\n".join(
        [
            f"# {found.best.trial.rate:.3g} requests/s with TTFT p90 "
            f"{result.ttft_p90_ms:.0f} ms and "
            f"ITL p99 {result.itl_p99_ms:.0f} ms, after {len(found.tried)} trials",
            "spec:",
            "  engine:",
            *lines,
        ]
    )
