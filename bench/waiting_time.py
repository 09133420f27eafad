"""Waiting-time estimators beside each other: how far off their forecasts are, and what comes of
deciding by them.

    bench/waiting_time.py [--rounds 10] [--plot FILE.svg]        a simulated engine, 1 to 2 minutes
    bench/waiting_time.py --real [--plot FILE.svg]               the sample model, lengths scaled
                                                                 down, 1 to 2 minutes
    bench/waiting_time.py --real --order-by preset "d_eff + mu" loadAware

Reproduces the source document's comparison: 60 requests in four groups,
whose completion time is forecast by RWT with presets, with d_eff, with d_eff
and mu, and by `loadAware`; and 85 requests in three groups that are served in
the order which the forecasts ask for.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from statistics import mean

from layout import table
from waiting_time_engine import SimulatedServer
from waiting_time_load import ATTAINMENT, PAPER, PRESETS, Group, Job, bimodal, jobs, probe
from waiting_time_runs import (
    Deciding,
    Forecasts,
    KnownLengths,
    Ours,
    Outcome,
    forecasters,
    forecasting,
)

from pdcluster_worker.routing.waiting_time.lengths import Survival
from pdctl.figures import Curve, Panel, draw_curves

PUBLISHED = {
    "preset": (46.3, 16.4, 25.4, 24.8),
    "d_eff": (31.5, 16.4, 19.0, 35.7),
    "d_eff + mu": (27.2, 3.8, 25.5, 10.9),
}
"""MAPE in per cent by group, in the order of PAPER."""

SEATS = 8
"""Seats of the second simulated server, which runs requests beside each other."""

WARM_PER_GROUP = 8
"""Requests of each group that were served before an order is decided on."""

BINS = 10
DECIDING = ("preset", "d_eff", "d_eff + mu", "loadAware")


def main() -> int:
    """Print tables; draw the plot where one was asked for."""
    options = parse()
    panels = real(options.order_by) if options.real else simulated(options.rounds)
    if options.plot is not None:
        draw_curves(options.plot, "Forecasts of when a request group is complete", panels)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="of the simulation, each with lengths of its own"
    )
    parser.add_argument("--real", action="store_true")
    parser.add_argument(
        "--order-by",
        nargs="+",
        choices=DECIDING,
        metavar="NAME",
        help="with --real: the second experiment",
    )
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def simulated(rounds: int) -> list[Panel]:
    """All tables of the simulation."""
    print(probed())
    panels = []
    for seats, is_warm in ((1, False), (1, True), (SEATS, False), (SEATS, True)):
        found = [forecast_of_round(f"round {number}", seats, is_warm) for number in range(rounds)]
        names = [*forecasters(PRESETS, seats), "lengths known"]
        title = (
            f"{seats} at a time, "
            f"{'after a round of the same groups' if is_warm else 'estimators begin from presets'}"
        )
        print(
            f"\nMAPE in per cent, {rounds} rounds, "
            f"{title}\n\n{by_group(found, names)}\n\n{by_part(found, names)}"
        )
        panels.append(errors_over_service(title, found, names))
    print(
        "\n85 requests, deadlines "
        f"{', '.join(f'{g.name} {g.slo_seconds:g} s' for g in ATTAINMENT)}, {rounds} rounds\n"
    )
    print(
        by_outcome(
            {
                name: [decided(name, f"slo {n}", ATTAINMENT) for n in range(rounds)]
                for name in DECIDING
            }
        )
    )
    print("\nthe same sizes, bimodal lengths and deadlines drawn again for each round\n")
    drawn = [drawn_deadlines(f"drawn {number}") for number in range(2 * rounds)]
    print(
        by_outcome(
            {
                name: [decided(name, f"drawn {n}", groups) for n, groups in enumerate(drawn)]
                for name in DECIDING
            }
        )
    )
    return panels


def real(order_by: Sequence[str] | None) -> list[Panel]:
    """One of the two experiments on the sample model."""
    import waiting_time_real as on

    server = on.RealServer()
    token_seconds = on.profile(server)
    print(
        f"{server.dtype}, {on.SEATS} at a time, {1e3 * token_seconds:.2f} ms a token in a full "
        "batch"
    )
    if order_by:
        print(
            ", ".join(
                f"{g.name} {g.num_requests} in {g.slo_seconds:.1f} s"
                for g in on.real_groups(token_seconds)
            ),
            "\n",
        )
        print(by_outcome({name: [on.decide(server, token_seconds, name)] for name in order_by}))
        return []
    panels = []
    for title, forecasts in on.forecast_rounds(server, token_seconds).items():
        names = list(forecasters(PRESETS, on.SEATS))
        print(
            "\nMAPE in per cent, "
            f"{title}\n\n{by_group([forecasts], names)}\n\n{by_part([forecasts], names)}"
        )
        panels.append(errors_over_service(title, [forecasts], names))
    return panels


def probed() -> str:
    """The document's probe on the simulated engine: seconds of a token of the first and the last
    ten.
    """
    server, seconds = SimulatedServer(), []
    for job in probe():
        server.start(job)
        while not server.advance(inf):
            pass
        seconds.append((job.ended - job.first) / job.output_tokens)
    return (
        f"probe: {mean(seconds[:10]):.5f} s a token in the first 10 requests, "
        f"{mean(seconds[-10:]):.5f} in the last 10 (.00881, .01008)"
    )


def forecast_of_round(seed: str, seats: int, is_warm: bool) -> list[Forecasts]:
    """All groups of one round, after one that does not count where it is warm."""
    server, columns = SimulatedServer(), forecasters(PRESETS, seats)
    columns["lengths known"] = Ours(KnownLengths(PRESETS, known_lengths()), seats)
    if is_warm:
        forecasting(server, jobs(PAPER, f"warm {seed}"), columns, seats, every_seconds=inf)
    return forecasting(server, jobs(PAPER, seed), columns, seats, every_seconds=30.0 / seats)


@cache
def known_lengths() -> dict[str, Survival]:
    """The distributions that answers of each group are drawn from."""
    source = random.Random(0)
    return {
        group.name: Survival.of([(bimodal(source, group.mean_output), 1.0) for _ in range(3000)])
        for group in PAPER
    }


def by_group(rounds: Sequence[Sequence[Forecasts]], names: Sequence[str]) -> str:
    """A row for each estimator, means over rounds: forecasts made during the service, and those by
    calibrated parameters.
    """
    groups = [forecasts.group for forecasts in rounds[0]]
    rows = []
    for name in names:
        during = [
            mean(forecasts[index].mape(name) for forecasts in rounds)
            for index in range(len(groups))
        ]
        after = [
            mean(forecasts[index].calibrated_error(name) for forecasts in rounds)
            for index in range(len(groups))
        ]
        published = PUBLISHED.get(name)
        rows.append(
            [
                name,
                *(
                    f"{mean(v):.1f} ({', '.join(f'{x:.1f}' for x in v)})" if v else "-"
                    for v in (during, after, published)
                ),
            ]
        )
    listed = ", ".join(groups)
    return table(
        ["estimator", f"during the service: mean ({listed})", "calibrated", "document"], rows
    )


def by_part(rounds: Sequence[Sequence[Forecasts]], names: Sequence[str]) -> str:
    """A table of how errors fall while a group is served."""
    parts = [(0.0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 1.0)]
    rows = [
        [name, *(f"{_mean_error(rounds, name, *part):.1f}" for part in parts)] for name in names
    ]
    return table(
        ["estimator", *(f"{100 * low:.0f} - {100 * high:.0f} %" for low, high in parts)], rows
    )


def errors_over_service(
    title: str, rounds: Sequence[Sequence[Forecasts]], names: Sequence[str]
) -> Panel:
    """A curve for each estimator."""
    points = {
        name: [
            ((n + 0.5) / BINS, _mean_error(rounds, name, n / BINS, (n + 1) / BINS))
            for n in range(BINS)
        ]
        for name in names
    }
    return Panel(
        f"Mean error of the forecasts, {title}",
        "share of the group's service",
        "MAPE, %",
        [Curve(name, points[name]) for name in names],
    )


def _mean_error(rounds: Sequence[Sequence[Forecasts]], name: str, low: float, high: float) -> float:
    values = []
    for forecasts in (f for found in rounds for f in found):
        at = [seconds for who, seconds, _ in forecasts.said if who == name]
        if any(low * forecasts.seconds <= seconds <= high * forecasts.seconds for seconds in at):
            values.append(forecasts.mape(name, low, high))
    return mean(values) if values else 0.0


# --- deciding ---------------------------------------------------------------------------------


def decided(name: str, seed: str, groups: Sequence[Group]) -> Outcome:
    """One simulated run that goes by one estimator."""
    server = SimulatedServer()
    warm = jobs([replace(group, num_requests=WARM_PER_GROUP) for group in groups], f"warm {seed}")
    deciding = Deciding(
        server, forecasters(PRESETS, 1)[name], 1, lambda those: seconds_of(server, those)
    )
    return deciding.run(groups, jobs(groups, seed), warm)


def seconds_of(server: SimulatedServer, those: Sequence[Job]) -> float:
    """That jobs take from now on, found on a copy of the server."""
    copy = SimulatedServer(server.cost)
    copy.num_ended = server.num_ended
    for job in those:
        copy.start(replace(job, flight=replace(job.flight)))
        while copy.running:
            copy.advance(inf)
    return copy.now


def drawn_deadlines(seed: str) -> list[Group]:
    """The groups of ATTAINMENT with bimodal lengths of 500 to 4500 tokens on the average, and
    deadlines that not all can meet.
    """
    source = random.Random(seed)
    groups = [
        replace(group, mean_output=source.uniform(500, 4500), is_bimodal=True)
        for group in ATTAINMENT
    ]
    end, found = 0.0, []
    for group in source.sample(groups, len(groups)):
        end += seconds_of(SimulatedServer(), jobs([group], seed))
        found.append(replace(group, slo_seconds=end * source.uniform(0.7, 1.3)))
    return sorted(found, key=lambda group: group.name)


def by_outcome(found: Mapping[str, Sequence[Outcome]]) -> str:
    """A row for each estimator."""
    rows = []
    for name, outcomes in found.items():
        of_groups = [
            mean(outcome.in_time[group] > 0 for outcome in outcomes)
            for group in outcomes[0].in_time
        ]
        rows.append(
            [
                name,
                f"{mean(outcome.attainment for outcome in outcomes):.1f}",
                *(f"{100 * share:.0f}" for share in of_groups),
                f"{mean(outcome.evictions for outcome in outcomes):.1f}",
                f"{mean(outcome.wrong_evictions for outcome in outcomes):.2f}",
            ]
        )
    groups = list(next(iter(found.values()))[0].in_time)
    return table(
        [
            "order by",
            "attainment, %",
            *(f"{g} in time, %" for g in groups),
            "evictions a run",
            "wrong ones",
        ],
        rows,
    )


if __name__ == "__main__":
    raise SystemExit(main())
