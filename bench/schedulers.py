"""Schedulers beside each other on the real engine: chats beside long prompts.

    bench/schedulers.py [--only NAME ...] [--rate 1.5] [--capacity] [--slo MS] [--plot FILE]

The engine runs in this process, with the real model and no server; steps take
their real time, pauses in which it would idle are skipped.  Requests are those
of `schedulers_load`: Poisson arrivals of chats, every third of them a long
prompt.  Without `--capacity`: inter-token latencies at one rate, which all
schedulers serve.  With it: the highest rate at which p99 TBT is inside the SLO
and the median scheduling delay inside 2 s [A7].  Run it on a machine that does
nothing else.
"""

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedulers_load import LOAD, RATES, Answers, Arrival, arrivals, highest

from pdctl.bench.svg import Curve, Panel, distribution, picture

if TYPE_CHECKING:
    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.messages.engine_settings import EngineSettings
    from pdcluster_worker.model.runner import Runner

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
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported, which is why imports come later
    os.environ["GOMP_SPINCOUNT"] = "20000"
    names = options.only or list(VARIANTS)
    bench = Bench(options)
    print(f"threads {options.threads}, {bench.dtype}, SLO {options.slo:g} ms, {LOAD.told(options.requests)}")
    if options.capacity:
        panels = [bench.capacities(names)]
    else:
        panels = [bench.latencies(names)]
    if options.plot is not None:
        options.plot.write_text(picture("Schedulers: chats beside long prompts", panels))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--requests", type=int, default=40, help="of one load")
    parser.add_argument("--capacity", action="store_true")
    parser.add_argument("--slo", type=float, default=150.0, help="of p99 TBT, in ms")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


class Bench:
    """The model, loaded once, and engines on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.model import ModelConfig
        from pdcluster_worker.model.runner import open_runner

        self._options = options
        engine = EngineConfig(
            max_batched_tokens=CONTEXT,
            max_sequences=SEATS,
            max_model_len=CONTEXT,
            num_blocks=NUM_BLOCKS,
            threads=options.threads,
        )
        self._runner, _, info = open_runner(ModelConfig(name="m", path=str(MODEL), dtype="bfloat16"), engine)
        self.dtype = info.dtype

    def latencies(self, names: list[str]) -> Panel:
        """A row for each scheduler at one rate; the distribution of gaps of all."""
        print("| scheduler | output tokens/s | TBT p50, ms | TBT p99 | TBT max | TTFT p50, s | TTFT p99 |")
        print("|---|---|---|---|---|---|---|")
        curves: list[Curve] = []
        for name in names:
            answers = self.answers(name, self._options.rate)
            print(f"| {name} | {answers.row()} |", flush=True)
            curves.append(distribution(name, [1e3 * gap for gap in answers.gaps]))
        return Panel("share of gaps between tokens at most so long", "ms", curves)

    def capacities(self, names: list[str]) -> Panel:
        """A row for each scheduler: the rate that it holds, and how it ends above."""
        slo = self._options.slo / 1e3
        print(f"| scheduler | capacity at p99 TBT {1e3 * slo:.0f} ms, requests/s | looked at: rate (p99 TBT ms, delay p50 s) |")
        print("|---|---|---|")
        curves: list[Curve] = []
        for name in names:
            seen: dict[float, Answers] = {}

            def holds(rate: float, name: str = name, seen: dict[float, Answers] = seen) -> bool:
                seen[rate] = self.answers(name, rate)
                return seen[rate].holds(slo)

            best = highest(RATES, holds)
            told = ", ".join(f"{rate:g} ({1e3 * seen[rate].tbt(99):.0f}, {seen[rate].delay(50):.1f})" for rate in sorted(seen))
            print(f"| {name} | {best:g} | {told} |", flush=True)
            curves.append(Curve(name, [(rate, 1e3 * seen[rate].tbt(99)) for rate in sorted(seen)]))
        return Panel("p99 TBT in ms by rate", "requests/s", curves)

    def answers(self, name: str, rate: float) -> Answers:
        """One load, after a few requests that do not count."""
        clock = SkippingClock()
        core = self._core(name, clock)
        warm = replace(LOAD, long_every=2)
        run(core, clock, arrivals(warm, WARM_UP_REQUESTS, 50.0, f"warm {name}"))
        seed = f"{self._options.seed} {rate}"
        return run(core, clock, arrivals(LOAD, self._options.requests, rate, seed))

    def _core(self, name: str, clock: SkippingClock) -> "EngineCore":
        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.engine.core import EngineCore
        from pdcluster_worker.testing import FakeNetwork, FakeTransport

        fields = dict(VARIANTS[name])
        if fields.get("scheduler") == "sarathi":
            fields["tbt_slo_milliseconds"] = SARATHI_SHARE * self._options.slo
        engine = EngineConfig(max_sequences=SEATS, max_model_len=CONTEXT, **fields)
        settings = settings_of(engine, NUM_BLOCKS, CONTEXT)
        runner: Runner = self._runner
        # No request here is received or sent.
        transport = FakeTransport(FakeNetwork(), NoMemory(), "engine", clock)
        return EngineCore(settings, runner, transport, clock)


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


class NoMemory:
    """Transport of an engine that sends and receives nothing."""

    block_bytes, num_blocks = 0, 0

    def block(self, block_id: int) -> memoryview:
        return memoryview(b"")

    landing = block

    def land(self, block_id: int, landing: memoryview) -> None: ...


def run(core: "EngineCore", clock: SkippingClock, due: list[Arrival]) -> Answers:
    """Serve all of them; the time of each token is when its step had ended."""
    from pdcluster_worker.messages.engine import RequestFailed, Submit, Tokens

    start = clock()
    answers = Answers({arrival.spec.request_id: start + arrival.seconds for arrival in due})
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
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
