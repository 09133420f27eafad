"""Lower bound of the error of forecasts in `bench/waiting_time.py`: all is known but the lengths
that are yet to be drawn.

    bench/waiting_time_floor.py [--rounds 10] [--seeds round] [--played]

Eight at a time, after a round of the same groups.  A request that has not ended has a length that
is not known before it ends, so the end of its group is a random variable T, whatever is known of
the distribution.  The least expected absolute percentage error is that of the median of T weighed
by 1/T.  `--played` finds it for every forecast: DRAWS sets of lengths from the true conditional
distributions are played on a copy of the true server.  Without it the columns are `loadAware` and
`loadAware` that is given the true distributions; seeds name sets of rounds.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import mean

from waiting_time import SEATS, known_lengths
from waiting_time_engine import SimulatedServer
from waiting_time_load import PAPER, PRESETS, Job, jobs
from waiting_time_runs import Forecaster, Forecasts, KnownLengths, Ours, forecasting

from pdcluster_worker.routing.waiting_time.load_aware import LoadAware
from pdcluster_worker.routing.waiting_time.request_queue import Completion

DRAWS = 40

_GOLDEN = 0.6180339887498949


class Played:
    """Knows the server and the distributions; draws lengths and plays them."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._known = known_lengths()

    def observe(self, completion: Completion) -> None:
        """Nothing is left to be learned."""

    def whole(self, members: Sequence[Job], line: Sequence[Job], elapsed: float) -> float:
        """The median of the ends, weighed by 1/T."""
        ends = sorted(
            elapsed + self._end(members, line, (draw + 0.5) / DRAWS) - self._server.now
            for draw in range(DRAWS)
        )
        total, passed = sum(1 / end for end in ends), 0.0
        for end in ends:
            passed += 1 / end
            if passed >= total / 2:
                return end
        return ends[-1]

    def rest(self, members: Sequence[Job], line: Sequence[Job]) -> float:
        """Asked for by an order of groups alone; the server of this bench keeps its order."""
        raise NotImplementedError("the floor is that of whole groups, which nothing orders here")

    def fresh(self, members: Sequence[Job]) -> float:
        """Not compared here."""
        return 0.0

    def _end(self, members: Sequence[Job], line: Sequence[Job], rank: float) -> float:
        copy, left = SimulatedServer(self._server.cost), set[int]()
        copy.now, copy.num_ended = self._server.now, self._server.num_ended
        waiting = list[Job]()
        those = {id(job) for job in members}
        for index, job in enumerate(line):
            rest = self._known[job.group].quantile_beyond(
                job.flight.num_tokens, (rank + _GOLDEN * index) % 1.0
            )
            played = replace(
                job, flight=replace(job.flight), output_tokens=job.flight.num_tokens + round(rest)
            )
            (copy.running if job in self._server.running else waiting).append(played)
            if id(job) in those:
                left.add(id(played))
        waiting.reverse()
        while left:
            while waiting and len(copy.running) < SEATS:
                copy.start(waiting.pop())
            left -= {id(job) for job in copy.advance(inf)}
        return copy.now


def one_round(seed: str, *, played: bool) -> list[Forecasts]:
    """All groups of one round."""
    server = SimulatedServer()
    columns: dict[str, Forecaster] = {"loadAware": Ours(LoadAware(PRESETS), SEATS)}
    columns["lengths known"] = Ours(KnownLengths(PRESETS, known_lengths()), SEATS)
    forecasting(server, jobs(PAPER, f"warm {seed}"), columns, SEATS, every_seconds=inf)
    if played:
        columns["all known"] = Played(server)
    return forecasting(server, jobs(PAPER, seed), columns, SEATS, every_seconds=30.0 / SEATS)


def said(found: Sequence[Sequence[Forecasts]]) -> Mapping[str, float]:
    """MAPE in per cent by column."""
    return {
        name: mean(group.mape(name) for groups in found for group in groups)
        for name in found[0][0].calibrated
    }


def main() -> int:
    """Print a line for each set of rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", nargs="+", default=["round"])
    parser.add_argument("--played", action="store_true")
    options = parser.parse_args()
    for seed in options.seeds:
        found = [
            one_round(f"{seed} {number}", played=options.played) for number in range(options.rounds)
        ]
        print(
            seed,
            ", ".join(f"{name} {error:.2f}" for name, error in said(found).items()),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
