"""Everything that one bench measured: filled by the bench, read by its report."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from footprint import Footprint
from stats import EngineCounters, ratios, summarize
from workload import Workload

from pdctl.bench.load import LoadResult


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload on one system in one round.

    others_cpu_seconds: processor time that went to processes outside the bench meanwhile
    engines:            what each worker's engine counted meanwhile
    """

    run: LoadResult
    others_cpu_seconds: float
    engines: Mapping[str, EngineCounters]


STOPPED = "stopped before its end"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything of one bench.

    measurements: by (workload, system), then by round; a system that failed in a round has none
                  there.
    conditions, start_seconds, footprints: by system; footprints of the first round.
    troubles:     why a system has no figures of a round.
    """

    workloads: Sequence[Workload]
    systems: Sequence[str]
    load_average: float
    measurements: defaultdict[tuple[str, str], dict[int, Measurement]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    conditions: dict[str, list[str]] = field(default_factory=dict)
    start_seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    @property
    def was_stopped(self) -> bool:
        """The user stopped it; what was measured before stands."""
        return any(trouble.startswith(STOPPED) for trouble in self.troubles)

    @property
    def has_failures(self) -> bool:
        """A system failed, or an answer was not complete."""
        return bool(self.troubles) or any(one.run.failures for _, one in self._all())

    def rounds(self, workload: str, system: str) -> list[Measurement]:
        """In order; empty where there is nothing."""
        found = self.measurements.get((workload, system), {})
        return [found[number] for number in sorted(found)]

    def figures(self, workload: str, system: str, metric: str) -> dict[int, float]:
        """One figure of each round that has it."""
        found = self.measurements.get((workload, system), {})
        summaries = {number: summarize(found[number].run) for number in sorted(found)}
        return {
            number: summary[metric] for number, summary in summaries.items() if metric in summary
        }

    def ratios(self, workload: str, metric: str, ours: str, theirs: str) -> list[float]:
        """ours / theirs in each round that both have the figure of."""
        a, b = (self.figures(workload, system, metric) for system in (ours, theirs))
        both = sorted(a.keys() & b.keys())
        return ratios([a[number] for number in both], [b[number] for number in both])

    def _all(self) -> Iterator[tuple[str, Measurement]]:
        for (_, system), found in self.measurements.items():
            yield from ((system, one) for one in found.values())
