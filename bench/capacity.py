"""Capacity of each scheduler at an SLO for gaps between tokens, on the real engine.

    bench/capacity.py [--only NAME ...] [--seconds 420] [--plot FILE]
    bench/capacity.py --quick          # seconds: a look whether all works, no figures

The greatest rate of Poisson arrivals at which p99 of the gaps holds a strict and a
relaxed SLO while the queue does not grow (`capacity_search`).  As in Sarathi-Serve's
paper the SLOs are 5 and 25 times a decode step that no prompt disturbs, which is
measured first.  Engine, load and clock are those of `bench/schedulers.py`; at one rate
all schedulers get the same requests at the same times.  The whole run ends within
`--seconds` and one load.  Run it on a machine that does nothing else.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from capacity_search import LADDER, Bounds, Capacity, LostWatch, Probe, Slo, probe_of, search
from schedulers import VARIANTS, Bench, fields_for
from schedulers_load import LOAD, Load, TimedRequest, timed_requests
from setting import setting_lines

from pdctl.figures import drawn, legend_right

NAMES: Mapping[str, str] = {
    "sarathi": "Sarathi-Serve",
    "prefill-first": "vLLM 0",
    "orca": "Orca",
    "request-level": "FasterTransformer",
    "continuous": "continuous, 256",
}
"""By variant: the name in the comparison; the last one is our default with a small budget."""

STRICT, RELAXED = 5, 25
"""Times the decode step."""
RELAXED_BUDGET = 2048
"""sarathi's under the relaxed SLO: it comes down to what the target allows."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    seconds: of arrivals in a load, whatever its rate, so that a queue that grows shows
    decode:  requests of the decode step that SLOs follow from
    warm:    before each load
    """

    load: Load
    least_requests: int
    seconds: float
    num_probes: int
    decode: tuple[int, Load]
    warm: Load


FULL = Sizes(
    LOAD,
    least_requests=24,
    seconds=12.0,
    num_probes=5,  # of one search: 17 rates by bisection
    decode=(16, Load(chat=(512, 24), long_every=99)),
    warm=Load(chat=(128, 8), long=(1536, 4), long_every=2),
)
QUICK = Sizes(
    Load(chat=(16, 6), long=(128, 4)),
    least_requests=6,
    seconds=1.0,
    num_probes=1,
    decode=(4, Load(chat=(16, 6), long_every=99)),
    warm=Load(chat=(16, 2), long=(64, 2), long_every=2),
)


@dataclass(slots=True)
class Row:
    """One scheduler: its capacity at each SLO, and the probes of its searches."""

    capacities: list[Capacity] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)


def main() -> int:
    """Print the tables; draw the plot where one was asked for."""
    load_average = os.getloadavg()[0]
    options = parse()
    # read when torch is imported, which is why imports come later
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"
    deadline = time.monotonic() + options.seconds
    names = options.only or (["sarathi", "request-level"] if options.quick else list(NAMES))
    search_all = Searches(Bench(options.threads), QUICK if options.quick else FULL, options.seed)
    slos = search_all.slos()
    rows: dict[str, Row] = {}
    for number, name in enumerate(names):
        share = (deadline - time.monotonic()) / (len(names) - number)
        rows[name] = search_all.row(name, slos, time.monotonic() + share)
        print(
            f"{name}: {', '.join(map(Capacity.cell, rows[name].capacities))}",
            file=sys.stderr,
            flush=True,
        )
    more = f"{options.threads} threads, "
    print(
        "\n".join(
            [
                *setting_lines("bench/capacity.py", more, load_average),
                *table(slos, rows, search_all.sizes),
            ]
        )
    )
    if options.plot is not None:
        plot(slos, rows, options.plot)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=420.0, help="of all searches together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Searches:
    """Searches on one model."""

    bench: Bench
    sizes: Sizes
    seed: str

    def slos(self) -> tuple[Slo, Slo]:
        """The strict and the relaxed one, by a decode step of this machine."""
        count, load = self.sizes.decode
        warm, due = self._warm(), timed_requests(load, count, 1e3, f"decode {self.seed}")
        step = median(self.bench.serve(VARIANTS["continuous, 2048"], warm, due).gaps)
        return Slo("strict", STRICT * step), Slo("relaxed", RELAXED * step)

    def row(self, name: str, slos: tuple[Slo, Slo], deadline: float) -> Row:
        """The capacity at both; the relaxed one first, whose probes say much of the strict one."""
        row, seen = Row(), dict[float, Probe]()
        strict, relaxed = slos
        for slo in (relaxed, strict):
            fields = self._fields(name, slo, relaxed)
            if slo is not relaxed and fields != self._fields(name, relaxed, relaxed):
                seen = {}
            now = time.monotonic()
            # Half of the time that is left belongs to the search that is still to come.
            until = now + (deadline - now) / 2 if slo is relaxed else deadline
            bounds = Bounds(self.sizes.num_probes, until, time.monotonic)
            row.capacities.insert(0, search(slo, self._prober(fields, slo), seen, bounds))
            row.probes += [probe for probe in seen.values() if probe not in row.probes]
        return row

    def _prober(self, fields: Mapping[str, Any], slo: Slo) -> "Prober":
        return Prober(self.bench, self.sizes, self.seed, fields, slo, self._warm())

    def _warm(self) -> list[TimedRequest]:
        return timed_requests(self.sizes.warm, 2, 1e3, f"warm {self.seed}")

    def _fields(self, name: str, slo: Slo, relaxed: Slo) -> dict[str, Any]:
        fields = fields_for(name, slo.seconds)
        if name == "sarathi" and slo is relaxed:
            fields["max_batched_tokens"] = RELAXED_BUDGET
        return fields


@dataclass(frozen=True, slots=True)
class Prober:
    """One load at a rate, on a new engine core."""

    bench: Bench
    sizes: Sizes
    seed: str
    fields: Mapping[str, Any]
    slo: Slo
    warm: list[TimedRequest]

    def __call__(self, rate: float) -> Probe:
        """The same requests for all schedulers."""
        count = max(self.sizes.least_requests, round(rate * self.sizes.seconds))
        due = timed_requests(self.sizes.load, count, rate, self.seed)
        lost = LostWatch(due, self.slo)
        answers = self.bench.serve(self.fields, self.warm, due, lost)
        return probe_of(rate, due, answers, lost.now)


def table(slos: Sequence[Slo], rows: Mapping[str, Row], sizes: Sizes) -> list[str]:
    """Both tables, as lines."""
    heads = [f"{slo.name}, {1e3 * slo.seconds:.0f} ms" for slo in slos]
    lines = [
        f"- {sizes.load.in_words(sizes.least_requests)}, more where they take under "
        f"{sizes.seconds:g} s; "
        f"SLOs are {STRICT} and {RELAXED} times a decode step",
        "",
        f"| scheduler | as in | {' | '.join(f'{head}: requests/s' for head in heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    lines += [
        f"| {name} | {NAMES.get(name, '')} | {' | '.join(map(Capacity.cell, row.capacities))} |"
        for name, row in rows.items()
    ]
    lines += [
        "",
        "| scheduler | looked at: requests/s (p99 TBT in ms, median delay in s) |",
        "|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {', '.join(probe.cell() for probe in sorted(row.probes, key=_rate))} |"
        )
    return lines


def plot(slos: Sequence[Slo], rows: Mapping[str, Row], path: Path) -> None:
    """Bars of all schedulers for each SLO.  Raises OSError."""
    groups = [f"{slo.name}: p99 of gaps at most {1e3 * slo.seconds:.0f} ms" for slo in slos]
    found = {name: [capacity.rate for capacity in row.capacities] for name, row in rows.items()}
    figures = {"slos": groups, "requests_per_second": found}
    with drawn(path, "Capacity at an SLO for gaps between tokens", [3.5], figures) as (axes,):
        for number, (name, rates) in enumerate(found.items()):
            at = [group + 0.8 * number / len(found) for group in range(len(rates))]
            bars = axes.bar(at, rates, 0.8 / len(found), align="edge", label=NAMES.get(name, name))
            axes.bar_label(bars, fmt="%.3g")
        axes.set_ylabel(f"requests/s, up to {LADDER[-1]:g}")
        axes.set_xticks([group + 0.4 for group in range(len(groups))], groups)
        legend_right(axes)


def _rate(probe: Probe) -> float:
    return probe.rate


if __name__ == "__main__":
    raise SystemExit(main())
