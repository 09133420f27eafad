"""`make bench`: our mixed worker, our 1P1D and Hugging Face `generate()` side by side, in one run on one machine.

All serve the same model folder in the same dtype and get the same prompts at
the same times.  One system is up at a time; each round starts, warms up,
measures and stops them all, in an order that turns, so that noise hits all
alike.  Exits 0 when every answer was complete, 1 when one was not, 2 when it
cannot run, 130 when it was stopped.

    bench/run.py [--workload A|B|all] [--only SYSTEM ...] [--rounds N] [--quick] [--seed SEED] [--log]
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from client import Target, run_workload
from cluster import Footprint, running_cluster
from hugging_face import running_generate
from report import Measurement, Results, log_entry, render
from stats import EngineCounters, Run, summarize
from workload import FULL, QUICK, Workload

from pdcluster_operator.api.load import load
from pdcluster_operator.local.machine import available_cores
from pdcluster_operator.local.model import cached_model

ROOT = Path(__file__).parents[1]
LOG = ROOT / "docs" / "bench" / "LOG.md"
FILES = {"mixed": ROOT / "examples" / "mixed.yaml", "1p1d": ROOT / "examples" / "chat.yaml"}
SYSTEMS = (*FILES, "hf")
IDLE_SECONDS = 10.0
SHOWN = ("TTFT p50 ms", "TPOT p50 ms", "output tokens/s", "goodput good/s")  # in progress lines; the report has all
STARTED_SECONDS = time.monotonic()


class System(Target, Protocol):
    """A system that is up."""

    @property
    def start_seconds(self) -> float:
        """From its command to ready."""
        ...

    def conditions(self) -> list[str]:
        """Dtype and threads as the system itself says them, a line for each of its processes."""
        ...

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """By worker; empty where there is nothing to read."""
        ...

    async def footprints(self, seconds: float) -> list[Footprint]:
        """What its workers use over so many idle seconds; empty where it is not measured."""
        ...


Start = Callable[[], AbstractAsyncContextManager[System]]


@dataclass(frozen=True, slots=True)
class Round:
    """What every system does in one round.  number: from 0."""

    number: int
    workloads: Sequence[Workload]
    seed: str
    vocab_size: int


def main() -> int:
    """Run the bench; returns the exit status."""
    options = _options()
    model = _model_folder()
    if not (model / "config.json").is_file():
        print(f"bench: no model in {model}: run `make model`", file=sys.stderr)
        return 2
    chosen = [workload for workload in (QUICK if options.quick else FULL) if options.workload in ("all", workload.name[0])]
    try:
        results = asyncio.run(_bench(options, chosen, model))
    except RuntimeError as e:  # a system that does not start
        print(f"bench: {e}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("bench: stopped before its end; nothing is left running", file=sys.stderr)
        return 130
    report = render(results, options.seed)
    print(report if not options.quick else f"{report}\n\nquick: sizes too small for figures, good for a look whether all works")
    if options.log:
        with LOG.open("a") as log:
            log.write(log_entry(report))
    return 1 if any(one.run.failures for measured in results.measurements.values() for one in measured) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="our mixed worker, our 1P1D and Hugging Face generate() side by side")
    parser.add_argument("--workload", choices=("A", "B", "all"), default="all", help="A: closed loop; B: Poisson arrivals of long prompts")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, help="rounds of every workload (default: 3 of A, 2 of B)")
    parser.add_argument("--quick", action="store_true", help="one round of tiny sizes, to see whether all works")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="of prompts and arrivals, to repeat a run (default: a new one)")
    parser.add_argument("--log", action="store_true", help=f"append the report to {LOG.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    if options.log and options.quick:
        parser.error("--log: keeps figures, and --quick makes none: leave one out")
    options.only = [name for name in SYSTEMS if name in options.only]
    return options


def _model_folder() -> Path:
    """Where `pdctl up` finds the model of both PDCluster files."""
    return cached_model(load(FILES["mixed"]).spec.model)


async def _bench(options: argparse.Namespace, workloads: Sequence[Workload], model: Path) -> Results:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # leaves through every `finally`, as Ctrl-C does
    results = Results(workloads, options.only, os.getloadavg()[0])
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    starts = {name: _start(name, model) for name in options.only}
    for number in range(options.rounds or max(workload.rounds for workload in workloads)):
        todo = [workload for workload in workloads if options.rounds or number < workload.rounds]
        turn = number % len(options.only)
        for name in (*options.only[turn:], *options.only[:turn]):
            _say(f"round {number + 1}: starting {name}")
            async with starts[name]() as system:
                await _visit(system, name, results, Round(number, todo, options.seed, vocab_size))
    return results


def _start(name: str, model: Path) -> Start:
    if name in FILES:
        return lambda: running_cluster(name, FILES[name])
    return lambda: running_generate(name, model, available_cores())  # as many threads as pdctl gives the one mixed worker


async def _visit(system: System, name: str, results: Results, this: Round) -> None:
    """Warm one system up, measure it, and look at it at rest in the first round."""
    results.conditions[name] = system.conditions()
    results.start_seconds[name].append(system.start_seconds)
    for length in {workload.num_prompt_tokens: workload for workload in this.workloads}.values():
        await run_workload(system, length.warm_up(), f"warm-up {this.seed} {this.number}", this.vocab_size)
    for workload in this.workloads:
        measured = await _measure(system, workload, this)
        results.measurements[workload.name, name].append(measured)
        _say(f"round {this.number + 1}: {name} {workload.name}: {_outcome(measured.run)}")
    if this.number == 0:
        results.footprints[name] = await system.footprints(IDLE_SECONDS)


def _outcome(run: Run) -> str:
    figures = ", ".join(f"{key} {value:.3g}" for key, value in summarize(run).items() if key in SHOWN)
    return f"{run.duration_seconds:.1f} s, {figures}, {len(run.failures)} failed"


async def _measure(system: System, workload: Workload, this: Round) -> Measurement:
    before = await system.engine_counters()
    run = await run_workload(system, workload, f"{this.seed} {this.number}", this.vocab_size)
    after = await system.engine_counters()
    return Measurement(run, {worker: counters.since(before[worker]) for worker, counters in after.items()})


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the report's."""
    print(f"bench: {time.monotonic() - STARTED_SECONDS:4.0f} s: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
