"""Orders of requests with deadlines on the real engine, at overload: arrival, deadline, and request
groups by each estimator.

The engine core, a model, the worker's estimation and its group order run in this process, without
HTTP; steps take their real time.  An answer ends at a drawn length, which no estimator knows.  A
request attains its objective when its last token is made by its deadline.

    bench/request_groups.py --load batches stream --seeds 0 1 2 [--only NAME ...] [--times 1.5]
    bench/request_groups.py --small --cpu-time   # a busy machine matters less

--cpu-time: the clock is the time for which this process computes, with one thread.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from request_groups_load import (
    CLASSES,
    SLOTS,
    Load,
    SloClass,
    TimedRequest,
    granularity,
    preset_tokens,
    request_of,
    timed_requests,
    warm_up,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the fakes of the tests

CLOCK = time.perf_counter
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
CONTEXT, NUM_BLOCKS = 1024, 1024
OTHER_COLUMNS = (
    *("error of a group, %", "error of a request, %", "deferrals", "evictions"),
    *("longest wait, of its deadline", "plans, % of the time", "seconds"),
)
PROFILED_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Arm:
    """adapts: of `rwt`, (time of a token, lengths of answers)."""

    name: str
    estimator: Literal["rwt", "loadAware"] = "loadAware"
    late_groups: Literal["Keep", "Defer", "Evict"] = "Keep"
    adapts: tuple[bool, bool] | None = None
    policy: Literal["fcfs", "priority"] = "priority"


ARMS = (
    Arm("FCFS", policy="fcfs"),
    Arm("EDF"),
    Arm("rwt, presets", "rwt", "Evict", (False, False)),
    Arm("rwt, d_eff", "rwt", "Evict", (True, False)),
    Arm("rwt, d_eff + mu", "rwt", "Evict", (True, True)),
    Arm("loadAware, defer alone", "loadAware", "Defer"),
    Arm("loadAware", "loadAware", "Evict"),
)


@dataclass(slots=True)
class Outcome:
    in_time: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_wait: float = 0.0  # of any request for its last token, over its deadline
    deferrals: int = 0
    evictions: int = 0
    errors: dict[str, float] = field(default_factory=dict)  # mean, by quantity
    plan_share: float = 0.0  # of the time
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def num_in_time(self) -> int:
        return self.in_time.total()


class Client:
    """A core as the worker's group order sees an engine."""

    problem: str | None = None

    def __init__(self, core: Any) -> None:
        self._core = core

    def send(self, message: Any) -> None:
        self._core.handle(message)


class Served:
    """One request on the engine."""

    def __init__(self, timed: TimedRequest, tracking: AbstractContextManager[Any]) -> None:
        self.timed = timed
        self._tracking = tracking
        self.tracked = tracking.__enter__()
        self.tokens: list[int] = []

    def end(self) -> None:
        self._tracking.__exit__(None, None, None)


class Bench:
    """The model, loaded once; a new engine core and estimation for each run."""

    def __init__(self, model_path: Path, threads: int) -> None:
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.worker import ModelConfig
        from pdcluster_worker.model.runner_loader import open_runner

        engine = EngineConfig(
            max_sequences=max(SLOTS.values()),
            max_model_len=CONTEXT,
            num_blocks=NUM_BLOCKS,
            threads=threads,
        )
        model = ModelConfig(name="m", path=str(model_path), dtype="bfloat16")
        self._runner, _, self.info = open_runner(model, engine)

    def _core(self, arm: Arm, slots: int) -> Any:
        from schedulers import idle_transport, settings_of

        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.engine.core import EngineCore

        engine = EngineConfig(
            max_sequences=slots,
            max_model_len=CONTEXT,
            num_blocks=NUM_BLOCKS,
            scheduling_policy=arm.policy,
        )
        # An evicted request finds most of its KV again.
        settings = replace(settings_of(engine, NUM_BLOCKS, CONTEXT), prefix_caching=True)
        clock = CLOCK
        return EngineCore(settings, self._runner, idle_transport(clock), clock)

    def unit_seconds(self, load: Load) -> float:
        """Seconds of a token in a full batch."""
        kind = SloClass("p", SLOTS[load], 1e6, PROFILED_TOKENS)
        times = []
        for turn in range(3):
            core = self._core(Arm("profile"), SLOTS[load])
            requests = [
                request_of(f"profile {turn} {number}", kind, 0.0, 1.0, 2 * PROFILED_TOKENS)
                for number in range(kind.num_requests)
            ]
            start = CLOCK()
            run = Run(core, None)
            run.serve(requests)
            times.append((CLOCK() - start) / (1.2 * PROFILED_TOKENS))
        return min(times[1:])

    def run(
        self, arm: Arm, load: Load, unit: float, seed: str, *, times: float, slack: float
    ) -> Outcome:
        from pdcluster_schema.qos import EstimationSpec
        from pdcluster_worker.metrics import Metrics
        from pdcluster_worker.routing.waiting_time.rates import Presets
        from pdcluster_worker.routing.waiting_time.rwt import RwtEstimator
        from pdcluster_worker.serving.estimation import Estimation
        from pdcluster_worker.serving.group_order import GroupOrder

        policy = EstimationSpec(
            estimator=arm.estimator,
            allow_client_deadline=True,
            late_groups=arm.late_groups,
            slo_granularity_seconds=granularity(load, unit),
            preset_token_milliseconds=1000 * unit,
            preset_output_tokens=preset_tokens(load),
        )
        metrics, core = Metrics(), self._core(arm, SLOTS[load])

        estimation = Estimation(metrics, lambda: policy, CLOCK)
        estimation.slots = lambda: SLOTS[load]
        if arm.adapts is not None:
            decode, output = arm.adapts
            presets = Presets(unit, float(preset_tokens(load)))
            assert estimation.estimator is not None  # made for the policy, and kept for it
            estimation._estimator = RwtEstimator(
                presets, adapts_decode=decode, adapts_output=output
            )
        order = GroupOrder(estimation, metrics, lambda: policy, lambda: [client])
        client = Client(core)
        planning = Stopwatch(order.update)
        estimation.on_change = planning
        run = Run(core, estimation)
        run.serve(warm_up(load, unit))
        before = _sums(metrics)
        planning.seconds, core._scheduler.num_preemptions = 0.0, 0
        outcome = run.serve(timed_requests(load, unit, seed, times, slack))
        after = _sums(metrics)
        for quantity, (total, count) in after.items():
            total, count = total - before[quantity][0], count - before[quantity][1]
            outcome.errors[quantity] = total / count if count else float("nan")
        outcome.evictions = core._scheduler.num_preemptions
        deferred = metrics.registry.get_sample_value("pdcluster_deferred_groups_total")
        outcome.deferrals = int(deferred or 0)
        outcome.plan_share = planning.seconds / outcome.seconds
        return outcome


class Stopwatch:
    def __init__(self, function: Any) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self) -> None:
        start = CLOCK()
        self._function()
        self.seconds += CLOCK() - start


def _sums(metrics: Any) -> dict[str, tuple[float, float]]:
    """(sum, count) of errors by quantity."""
    found = dict.fromkeys(("ttft", "completion", "group"), (0.0, 0.0))
    for family in metrics.registry.collect():
        for sample in family.samples if family.name == "pdcluster_estimate_error_ratio" else ():
            total, count = found[sample.labels["quantity"]]
            if sample.name.endswith("_sum"):
                found[sample.labels["quantity"]] = (total + sample.value, count)
            elif sample.name.endswith("_count"):
                found[sample.labels["quantity"]] = (total, count + sample.value)
    return found


class Run:
    """Requests on one core."""

    def __init__(self, core: Any, estimation: Any) -> None:
        self._core = core
        self._estimation = estimation
        self._served: dict[str, Served] = {}

    def serve(self, due: Sequence[TimedRequest]) -> Outcome:
        from pdcluster_worker.messages.engine import Tokens

        outcome, waiting, start = Outcome(), list(due)[::-1], CLOCK()
        while waiting or self._served:
            while waiting and waiting[-1].seconds <= CLOCK() - start:
                self._submit(waiting.pop())
            for output in self._core.step():
                for token in output.tokens if isinstance(output, Tokens) else ():
                    self._take(token, start, outcome)
        outcome.seconds = CLOCK() - start
        return outcome

    def _submit(self, timed: TimedRequest) -> None:
        from msgspec import structs

        from pdcluster_worker.messages.engine import Submit

        # The engine ends the answer at its length; the estimators see the longest one allowed.
        sampling = structs.replace(timed.spec.sampling, max_tokens=timed.num_tokens)
        spec = structs.replace(timed.spec, sampling=sampling)
        if self._estimation is not None:
            served = Served(timed, self._estimation.tracking(timed.spec))
            spec = structs.replace(spec, group=served.tracked.request.due_group)
        else:
            served = Served(timed, Untracked())
        self._served[spec.request_id] = served
        self._core.handle(Submit(spec))

    def _take(self, token: Any, start: float, outcome: Outcome) -> None:
        served = self._served[token.request_id]
        served.tokens.append(token.token_id)
        served.tracked.token(token)
        if token.finish_reason is None:
            return
        del self._served[token.request_id]
        served.end()
        timed = served.timed
        took = CLOCK() - start - timed.seconds
        deadline = timed.spec.deadline_seconds or 0.0
        outcome.in_time[timed.slo_class] += took <= deadline
        outcome.longest_wait = max(outcome.longest_wait, took / deadline)
        digest = hashlib.sha256(repr(served.tokens).encode()).hexdigest()
        outcome.answers[token.request_id] = digest


class Untracked:
    """In the place of an estimation, for the profile."""

    def __enter__(self) -> "Untracked":
        return self

    def __exit__(self, *_: object) -> None: ...

    def token(self, token: object) -> None: ...


def main() -> int:
    options = parse()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported
    if options.cpu_time:
        global CLOCK
        CLOCK, options.threads = time.process_time, 1
        os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(_small(Path(folder)) if options.small else MODEL, options.threads)
    arms = [arm for arm in ARMS if not options.only or arm.name in options.only]
    for load in options.load:
        unit = bench.unit_seconds(load)
        total = sum(kind.num_requests for kind in CLASSES[load])
        model = "a random model of 25 MB" if options.small else MODEL.name
        kind = "CPU time" if options.cpu_time else "time"
        print(
            f"\n{load}: {total} requests, {SLOTS[load]} slots, {1000 * unit:.1f} ms a token, "
            f"{model}, {bench.info.dtype}, {options.threads} threads, {kind}, "
            f"times {options.times:g}, slack {options.slack:g}, seeds {' '.join(options.seeds)}\n"
        )
        outcomes = {arm.name: list[Outcome]() for arm in arms}
        for seed in options.seeds:  # arms in turn, so that a slow minute of the machine is shared
            for arm in arms:
                outcomes[arm.name].append(
                    bench.run(arm, load, unit, seed, times=options.times, slack=options.slack)
                )
                print(f"  {seed} {arm.name}: {outcomes[arm.name][-1].num_in_time}", file=sys.stderr)
        print("\n".join(rows(load, outcomes)), flush=True)
    return 0


def _small(folder: Path) -> Path:
    from tests.make_tiny_model import make_tiny_model

    return make_tiny_model("llama-heavy", folder)


def rows(load: Load, outcomes: dict[str, list[Outcome]]) -> Iterator[str]:
    names = [kind.name for kind in CLASSES[load]]
    columns = ["order", "in time, %", *(f"{name}, %" for name in names), *OTHER_COLUMNS]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    first = next(iter(outcomes.values()))
    total = sum(kind.num_requests for kind in CLASSES[load])
    for name, runs in outcomes.items():
        shares = [100 * run.num_in_time / total for run in runs]
        classes = [
            f"{mean(100 * run.in_time[kind.name] / kind.num_requests for run in runs):.0f}"
            for kind in CLASSES[load]
        ]
        others = [
            " ".join(f"{100 * run.errors[quantity]:.0f}" for run in runs)
            for quantity in ("group", "completion")
        ]
        cells = [
            name,
            f"**{mean(shares):.1f}** ({' '.join(f'{each:.1f}' for each in shares)})",
            *classes,
            *others,
            f"{mean(run.deferrals for run in runs):.0f}",
            f"{mean(run.evictions for run in runs):.0f}",
            f"{max(run.longest_wait for run in runs):.1f}",
            f"{100 * max(run.plan_share for run in runs):.1f}",
            f"{mean(run.seconds for run in runs):.1f}",
        ]
        yield f"| {' | '.join(cells)} |"
    for name, runs in outcomes.items():
        differ = [
            sum(run.answers[key] != answer for key, answer in reference.answers.items())
            for run, reference in zip(runs, first, strict=True)
        ]
        yield f"{name}: {differ} of {total} answers differ from those of {next(iter(outcomes))}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--only", nargs="+", choices=[arm.name for arm in ARMS], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--times", type=float, default=1.5, help="of the capacity, for `stream`")
    parser.add_argument("--slack", type=float, default=1.0, help="factor of all deadlines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a random model of 25 MB")
    parser.add_argument("--cpu-time", action="store_true", help="and one thread")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
