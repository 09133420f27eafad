"""`make bench-peers`: ours, vLLM and Hugging Face side by side, in one run on one machine.

All serve the same model folder in the same dtype and get the same prompts at
the same times.  One system is measured at a time; each round starts, warms up,
measures and stops them, in an order that turns, so that noise hits all alike.
vLLM stays up, idle, while others are measured: its start takes a minute, and at
rest it takes less than 2 % of a core.  A system that fails is reported, and the
figures of the others stay.
Exits 0 when every answer was complete, 1 when one was not or a system failed,
2 when it cannot run, 130 when it was stopped.

    bench/run.py [--workload NAME ...] [--only SYSTEM ...] [--rounds N] [--set FIELD=VALUE ...]
                 [--variant FIELD=VALUE ...] [--quick] [--seed SEED] [--log]
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from cluster import Setup, running_cluster
from footprint import others_cpu_seconds
from hugging_face import running_generate
from report import render
from results import STOPPED, Measurement, Results
from setting import LOG_HELP, keep_report
from stats import summarize
from system import Start, System
from vllm_client import run_client
from vllm_server import Served, check_installed, running_vllm
from workload import FULL, GROUPS, QUICK, Workload

from pdcluster_api.errors import OperatorError, StartError
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load
from pdcluster_worker.system.native_dtype import read_native_dtype
from pdctl.bench.load import LoadResult, run_load
from pdctl.bench.measure import require_complete
from pdctl.local.machine import available_cores
from pdctl.local.model import cached_model

ROOT = Path(__file__).parents[1]
FILES = {"mixed": ROOT / "examples" / "mixed.yaml", "1p1d": ROOT / "examples" / "chat.yaml"}
SYSTEMS = (*FILES, "vllm", "hf")
VARIANT = "variant"
NAMES = tuple(dict.fromkeys([*GROUPS, *(workload.name for workload in FULL)]))
KEPT = frozenset({"vllm"})
IDLE_SECONDS = 5.0
# in progress lines; the report has all
SHOWN = ("TTFT p50 ms", "TPOT p50 ms", "output tokens/s", "goodput good/s")
STARTED_SECONDS = time.monotonic()


@dataclass(frozen=True, slots=True)
class Bench:
    """One run of the bench.

    engine:  fields of `spec.engine` that replace those of our files
    dtype:   of all systems: what our workers choose on this machine
    variant: further such fields of the system VARIANT, which is `mixed` otherwise
    """

    systems: Sequence[str]
    workloads: Sequence[Workload]
    rounds: int
    seed: str
    model: Path
    engine: Mapping[str, Any]
    dtype: str
    variant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def served(self) -> Served:
        """As many threads as pdctl gives the one mixed worker."""
        return Served(self.model, available_cores(), self.dtype)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])

    def start(self, name: str) -> Start:
        """Start of one system."""
        if name == VARIANT:
            setup = Setup(FILES["mixed"], self.model, {**self.engine, **self.variant})
            return lambda: running_cluster(name, setup)
        if name in FILES:
            return lambda: running_cluster(name, Setup(FILES[name], self.model, self.engine))
        if name == "vllm":
            return lambda: running_vllm(name, self.served)
        return lambda: running_generate(name, self.model, available_cores())


class Stage:
    """The systems that are up: the one that is measured, and those of KEPT that were, idle."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._kept: dict[str, tuple[System, AsyncExitStack]] = {}

    @asynccontextmanager
    async def system(self, name: str) -> AsyncIterator[tuple[System, bool]]:
        """One system, and whether it was started for this; it ends here, or on an error, or in
        `clear`.
        """
        is_new = name not in self._kept
        if is_new:
            _say(f"starting {name}")
            stack = AsyncExitStack()
            self._kept[name] = (await stack.enter_async_context(self.bench.start(name)()), stack)
        try:
            yield self._kept[name][0], is_new
        except BaseException:
            await self._end(name)
            raise
        if name not in KEPT:
            await self._end(name)

    async def clear(self) -> None:
        """End them all."""
        for name in list(self._kept):
            await self._end(name)

    async def _end(self, name: str) -> None:
        await self._kept.pop(name)[1].aclose()


def main() -> int:
    """Run the bench; returns the exit status."""
    options = _options()
    try:
        bench = _bench_of(options)
        results = asyncio.run(_run(bench))
    except (OperatorError, InvalidObjectError) as e:  # nothing was measured
        print(f"bench: {e}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("bench: stopped before its end; nothing is left running", file=sys.stderr)
        return 130
    report = render(results, bench.seed)
    print(
        f"quick: sizes too small for figures, good for a look whether all works\n\n{report}"
        if options.quick
        else report
    )
    if results.was_stopped:
        return 130
    if options.log:
        keep_report(report)
    return 1 if results.has_failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="ours, vLLM and Hugging Face generate() side by side"
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=NAMES,
        default=GROUPS,
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; B is all of B-*",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SYSTEMS,
        default=SYSTEMS,
        metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="of every workload on every system (default: 3)"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="of spec.engine, in place of our files' values",
    )
    parser.add_argument(
        "--variant",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help=f"measures `mixed` with these fields of spec.engine too, as the system {VARIANT}: "
        "what a setting costs or gains",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether all works")
    parser.add_argument(
        "--seed",
        default=secrets.token_hex(4),
        help="of prompts and arrivals, to repeat a run (default: a new one)",
    )
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    if options.log and options.quick:
        parser.error("--log: keeps figures, and --quick makes none: leave one out")
    return options


def _bench_of(options: argparse.Namespace) -> Bench:
    """Read the options.  Raises StartError when a part of the bench is not on this machine."""
    # where `pdctl up` finds the model of both files
    model = cached_model(load(FILES["mixed"]).spec.model)
    if not (model / "config.json").is_file():
        raise StartError(f"no model in {model}: run `make model`", exit_code=2)
    sizes = QUICK if options.quick else FULL
    workloads = [
        workload for workload in sizes if {workload.name, workload.group} & set(options.workload)
    ]
    systems = [name for name in SYSTEMS if name in options.only] + (
        [VARIANT] if options.variant else []
    )
    if "vllm" in systems or any(workload.by == "vllm" for workload in workloads):
        check_installed()
    engine, variant = engine_fields(options.set), engine_fields(options.variant)
    return Bench(
        systems,
        workloads,
        options.rounds,
        options.seed,
        model,
        engine,
        read_native_dtype(),
        variant,
    )


def engine_fields(pairs: Sequence[str]) -> dict[str, Any]:
    """Fields of `spec.engine` and their values, of `FIELD=VALUE`.  Raises StartError.

    >>> engine_fields(["maxBatchedTokens=512"])
    {'maxBatchedTokens': 512}
    """
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise StartError(
            f"--set or --variant: {wrong[0]} is no FIELD=VALUE; write e.g. maxBatchedTokens=512",
            exit_code=2,
        )
    fields = dict(pair.split("=", 1) for pair in pairs)
    return {name: yaml.safe_load(value) for name, value in fields.items()}


async def _run(bench: Bench) -> Results:
    task = asyncio.current_task()
    assert task is not None
    # leaves through every `finally`, as Ctrl-C does
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    results = Results(bench.workloads, bench.systems, os.getloadavg()[0])
    stage = Stage(bench)
    try:
        for number in range(bench.rounds):
            turn = number % len(bench.systems)
            for name in (*bench.systems[turn:], *bench.systems[:turn]):
                await _turn(stage, name, results, number)
    except asyncio.CancelledError:  # what was measured is reported all the same
        if not results.measurements:
            raise
        results.troubles.append(f"{STOPPED}, in round {number + 1} at {name}")
    finally:
        await stage.clear()
    if not results.measurements:
        raise StartError("no system gave a figure:\n" + "\n".join(results.troubles), exit_code=2)
    return results


async def _turn(stage: "Stage", name: str, results: Results, number: int) -> None:
    """Measure one system; an error of it is reported and ends its turn only."""
    try:
        async with stage.system(name) as (system, is_new):
            if is_new:
                results.start_seconds[name].append(system.start_seconds)
            await _visit(stage.bench, system, name, results, number)
    except InvalidObjectError:
        raise
    except (
        OperatorError,
        OSError,
        LookupError,
        ValueError,
        aiohttp.ClientError,
        psutil.Error,
    ) as e:
        trouble = f"round {number + 1}, {name}: {type(e).__name__}: {e}"
        results.troubles.append(trouble)
        _say(trouble)


async def _visit(bench: Bench, system: System, name: str, results: Results, number: int) -> None:
    """Warm one system up, measure it, and look at it at rest in the first round."""
    results.conditions[name] = system.conditions()
    for length in {workload.num_prompt_tokens: workload for workload in bench.workloads}.values():
        warm_up = length.warm_up()
        needs_ping = warm_up.needs_ping(f"warm-up {bench.seed} {number}", bench.vocab_size)
        require_complete(await run_load(system, needs_ping, warm_up.pace(bench.seed)))
    for workload in bench.workloads:
        if system.address is None and not workload.for_batches:
            continue
        measured = await _measure(bench, system, workload, f"{bench.seed} {number}")
        results.measurements[workload.name, name][number] = measured
        _say(f"round {number + 1}: {name} {workload.name}: {_outcome(measured.run)}")
    if number == 0:
        results.footprints[name] = await system.footprints(IDLE_SECONDS)


def _outcome(run: LoadResult) -> str:
    figures = ", ".join(
        f"{key} {value:.3g}" for key, value in summarize(run).items() if key in SHOWN
    )
    return f"{run.duration_seconds:.1f} s, {figures}, {len(run.failures)} failed"


async def _measure(bench: Bench, system: System, workload: Workload, seed: str) -> Measurement:
    before = await system.engine_counters()
    others = others_cpu_seconds()
    if workload.by == "vllm" and system.address is not None:
        run = await run_client(system.address, workload, bench.served, seed)
    else:
        run = await run_load(
            system, workload.needs_ping(seed, bench.vocab_size), workload.pace(seed)
        )
    others = max(0.0, others_cpu_seconds() - others)
    after = await system.engine_counters()
    return Measurement(
        run, others, {worker: counters.since(before[worker]) for worker, counters in after.items()}
    )


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the report's."""
    print(
        f"bench: {time.monotonic() - STARTED_SECONDS:4.0f} s: {text}", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
