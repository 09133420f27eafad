"""Schedulers beside each other on the real engine: chats beside long prompts.

    bench/schedulers.py [--only NAME ...] [--rate 1.5] [--slo MS] [--plot FILE]

The engine runs in this process, with the real model and no server; steps take
their real time, pauses in which it would idle are skipped.  Requests are those
of `schedulers_load`: Poisson arrivals of chats, every third of them a long
prompt, at one rate, which all schedulers serve.  The rates that they can serve
are looked for by `bench/capacity.py`.  Run it on a machine that does nothing else.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedulers_load import LOAD, Answers, TimedRequest, timed_requests

from pdctl.figures import Curve, Panel, distribution, draw_curves

if TYPE_CHECKING:
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.engine.ports import Transport
    from pdcluster_worker.messages.engine_settings import EngineSettings
    from pdcluster_worker.model.runner import Runner

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the fakes of the tests

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
CONTEXT, NUM_BLOCKS, SEATS = 2048, 2048, 64
WARM_UP_REQUESTS = 8

VARIANTS: Mapping[str, dict[str, Any]] = {
    "continuous": {"max_batched_tokens": 256},
    "continuous, 2048": {"max_batched_tokens": CONTEXT},
    "sarathi": {"scheduler": "sarathi", "max_batched_tokens": 512},
    "simple-chunking": {"scheduler": "simple-chunking", "max_batched_tokens": 256},
    "prefill-first": {"scheduler": "prefill-first", "max_batched_tokens": CONTEXT},
    "orca": {"scheduler": "orca", "max_batched_tokens": CONTEXT},
    "request-level": {"scheduler": "request-level", "max_batched_tokens": CONTEXT},
}
"""Fields of the engine by name.  sarathi's target for TBT follows from `--slo`."""

SARATHI_SHARE = 0.8
"""Share of the SLO as sarathi's target, since a p99 lies above the target of its steps."""


class SkippingClock:
    """The machine's clock, less the time that was skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self._skipped

    def skip_to(self, seconds: float) -> None:
        """Nothing happens until then."""
        self._skipped += max(0.0, seconds - self())


def main() -> int:
    """Print a table; draw the plot where one was asked for."""
    options = parse()
    # read when torch is imported, which is why imports come later
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"
    names = options.only or list(VARIANTS)
    bench = Bench(options.threads)
    print(
        f"threads {options.threads}, {bench.dtype}, SLO {options.slo:g} ms, "
        f"{LOAD.in_words(options.requests)}"
    )
    panels = [bench.latencies(names, options)]
    if options.plot is not None:
        draw_curves(options.plot, "Schedulers: chats beside long prompts", panels)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--requests", type=int, default=40, help="of one load")
    parser.add_argument(
        "--slo", type=float, default=150.0, help="p99 TBT that sarathi is set for, in ms"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


class Bench:
    """The model, loaded once, and engines on it."""

    def __init__(self, threads: int) -> None:
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.worker import ModelConfig
        from pdcluster_worker.model.runner_loader import open_runner

        engine = EngineConfig(
            max_batched_tokens=CONTEXT,
            max_sequences=SEATS,
            max_model_len=CONTEXT,
            num_blocks=NUM_BLOCKS,
            threads=threads,
        )
        model = ModelConfig(name="m", path=str(MODEL), dtype="bfloat16")
        self._runner, _, info = open_runner(model, engine)
        self.dtype = info.dtype

    def latencies(self, names: list[str], options: argparse.Namespace) -> Panel:
        """A row for each scheduler at one rate; the distribution of gaps of all."""
        print(
            "| scheduler | output tokens/s | TBT p50, ms | TBT p99 | TBT max | TTFT p50, s | TTFT "
            "p99 |"
        )
        print("|---|---|---|---|---|---|---|")
        curves: list[Curve] = []
        for name in names:
            fields = fields_for(name, options.slo / 1e3)
            warm = timed_requests(
                replace(LOAD, long_every=2), WARM_UP_REQUESTS, 50.0, f"warm {name}"
            )
            seed = f"{options.seed} {options.rate}"
            answers = self.serve(
                fields, warm, timed_requests(LOAD, options.requests, options.rate, seed)
            )
            print(f"| {name} | {answers.row()} |", flush=True)
            curves.append(distribution(name, [1e3 * gap for gap in answers.gaps]))
        return Panel("Gaps between tokens", "milliseconds", "at most so long, % of all", curves)

    def serve(
        self,
        fields: Mapping[str, Any],
        warm: list[TimedRequest],
        due: list[TimedRequest],
        is_over: Callable[[Answers, float], bool] | None = None,
    ) -> Answers:
        """One load on a new engine core of these fields, after a few requests that do not count.

        is_over: see `run`
        """
        clock = SkippingClock()
        core = self._core(fields, clock)
        run(core, clock, warm)
        return run(core, clock, due, is_over)

    def _core(self, fields: Mapping[str, Any], clock: SkippingClock) -> "EngineCore":
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.engine.core import EngineCore

        engine = EngineConfig(max_sequences=SEATS, max_model_len=CONTEXT, **fields)
        settings = settings_of(engine, NUM_BLOCKS, CONTEXT)
        runner: Runner = self._runner
        return EngineCore(settings, runner, idle_transport(clock), clock)


def fields_for(name: str, slo_seconds: float) -> dict[str, Any]:
    """Fields of the engine for this variant, where gaps between tokens are to be inside an SLO."""
    fields = dict(VARIANTS[name])
    if fields.get("scheduler") == "sarathi":
        fields["tbt_slo_milliseconds"] = SARATHI_SHARE * slo_seconds * 1e3
    return fields


def settings_of(engine: "EngineConfig", num_blocks: int, max_model_len: int) -> "EngineSettings":
    """Settings of a core that runs here, without a prefix cache: each prompt is computed."""
    from pdcluster_worker.messages.engine_settings import EngineSettings

    return EngineSettings(
        block_size=engine.block_size,
        num_blocks=num_blocks,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=max_model_len,
        prefix_caching=False,
        scheduler=engine.scheduler_settings,
    )


def idle_transport(clock: Callable[[], float]) -> "Transport":
    """Transport of an engine that sends and receives nothing."""
    from tests.worker.fake_network import FakeNetwork, FakeTransport

    return FakeTransport(FakeNetwork(), NoMemory(), "engine", clock)


class NoMemory:
    heads, head_bytes, num_blocks = range(1), 0, 0

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        return memoryview(b"")

    staging = block

    def write_block(
        self, block_id: int, staging: memoryview, heads: range | None = None
    ) -> None: ...


def run(
    core: "EngineCore",
    clock: SkippingClock,
    due: list[TimedRequest],
    is_over: Callable[[Answers, float], bool] | None = None,
) -> Answers:
    """Serve all of them; the time of each token is when its step had ended.

    is_over: asked after each step, with the time; True ends the load early
    """
    from pdcluster_worker.messages.engine import RequestFailed, Submit, Tokens

    start = clock()
    answers = Answers({each.spec.request_id: start + each.seconds for each in due})
    waiting = due[::-1]
    while not answers.is_complete(len(due)):
        if not core.has_work and waiting:
            clock.skip_to(start + waiting[-1].seconds)
        while waiting and start + waiting[-1].seconds <= clock():
            core.handle(Submit(waiting.pop().spec))
        for output in core.step():
            if isinstance(output, RequestFailed):
                raise RuntimeError(f"{output.request_id}: {output.message}")
            if isinstance(output, Tokens):
                answers.take(output.tokens, clock())
        if is_over is not None and is_over(answers, clock()):
            break
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
