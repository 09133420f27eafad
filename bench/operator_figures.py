"""Figures of the operator's bench: differences of Prometheus pages, passes out of the operator's
log, and their Markdown.

Pure; `operator_scale` fetches pages and log and says when.  A pass is the work
on one PDCluster from its start to its end; the time that it waited for a worker
is no part of it.  Milliseconds are exact, since every reconcile is a line of the log.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from pdctl.bench.load import percentile

Key = tuple[str, tuple[tuple[str, str], ...]]
WRITES = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})
"""Verbs of writes, as the API server counts them."""

_PASS = re.compile(r"reconcile ended key=\S+ wrote=(True|False) seconds=([0-9.]+)$", re.MULTILINE)
_MIB = 2**20
_CALLS = "pdcluster_operator_api_calls_total"


@dataclass(frozen=True)
class Samples:
    """Every sample of a page by name and labels; the difference of two pages holds what was counted
    between them.
    """

    values: Mapping[Key, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, page: str) -> Self:
        """Read a page in Prometheus' text format.  Raises ValueError when it is something else."""
        families = text_string_to_metric_families(page)
        return cls(
            {
                (s.name, tuple(sorted(s.labels.items()))): s.value
                for family in families
                for s in family.samples
            }
        )

    def __sub__(self, other: Self) -> Self:
        return type(self)(
            {key: value - other.values.get(key, 0.0) for key, value in self.values.items()}
        )

    def value(self, name: str) -> float:
        """The sum over all labels; 0 for a name that is not there."""
        return sum(value for (found, _), value in self.values.items() if found == name)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums by some labels, without those that are 0."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for (found, pairs), value in self.values.items():
            if found == name and value:
                given = dict(pairs)
                sums[tuple(given.get(label, "") for label in labels)] += value
        return dict(sorted(sums.items()))


@dataclass(frozen=True)
class Pass:
    """One pass: whether it wrote anything, or tried to, and how long it took."""

    wrote: bool
    seconds: float


@dataclass(frozen=True)
class Phase:
    """One phase: how long it took, what operator and API server counted in it, every pass, the
    CPU time of each process, and the operator's memory at its end.

    servers_cpu_seconds: by process of the control plane
    notes: what else is to be said of it, a sentence each
    """

    name: str
    seconds: float
    operator: Samples
    server: Samples
    passes: Sequence[Pass]
    cpu_seconds: float
    rss_bytes: int
    peak_rss_bytes: int
    servers_cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def lines(self, objects: int) -> list[str]:
        """The phase as Markdown; objects: the number of PDClusters."""
        writes = server_writes(self.server)
        leases = writes.pop("leases", 0.0)
        return [
            f"### {self.name}",
            "",
            *(f"- {note}" for note in self.notes),
            f"- {self.seconds:.1f} s; operator: CPU {self.cpu_seconds:.1f} s, RSS "
            f"{self.rss_bytes / _MIB:.0f} MiB at the end,"
            f" {self.peak_rss_bytes / _MIB:.0f} MiB at its peak since it started",
            f"- Writes that the API server counted, Leases aside: {_listed(writes)}; of Leases: "
            f"{leases:.0f}",
            "- Passes that ended with an exception: "
            f"{self.operator.value('pdcluster_operator_reconcile_errors_total'):.0f};"
            f" answers to the operator by status: {_listed(answers(self.operator))}",
            "",
            *passes_table(self.passes),
            "",
            *calls_table(self.operator, objects),
            "",
        ]


@dataclass(frozen=True)
class WorkerCost:
    """Cost of one worker for the operator, in the three phases of a run."""

    made_cpu_ms: float
    made_calls: float
    rest_cpu_ms: float  # of each second
    rest_writes: float
    restart_cpu_ms: float
    restart_calls: float
    kib: float  # of resident memory, at the end of the second phase

    @classmethod
    def of(cls, phases: Sequence[Phase], empty_rss_bytes: int, num_workers: int) -> Self:
        """empty_rss_bytes: of an operator without objects"""
        made, rest, restart = phases
        writes = server_writes(rest.server)
        writes.pop("leases", None)
        total = (
            1e3 * made.cpu_seconds,
            made.operator.value(_CALLS),
            1e3 * rest.cpu_seconds / rest.seconds,
            sum(writes.values()),
            1e3 * restart.cpu_seconds,
            restart.operator.value(_CALLS),
            (rest.rss_bytes - empty_rss_bytes) / 2**10,
        )
        return cls(*(each / num_workers for each in total))


def cost_table(costs: Mapping[str, WorkerCost]) -> list[str]:
    """Costs of a worker by kind, with the ratio of the last kind to the first."""
    rows = {
        "operator's CPU until all is made, ms": "made_cpu_ms",
        "API calls until all is made": "made_calls",
        "CPU of each second at rest, ms": "rest_cpu_ms",
        "writes at rest": "rest_writes",
        "CPU after a restart, ms": "restart_cpu_ms",
        "API calls after a restart": "restart_calls",
        "memory, KiB": "kib",
    }
    lines = []
    for text, name in rows.items():
        values = [getattr(cost, name) for cost in costs.values()]
        ratio = f"{values[-1] / values[0]:.2f}" if values[0] else "-"
        lines.append(f"| {' | '.join([text, *(f'{each:.3g}' for each in values), ratio])} |")
    return [
        f"| for each worker | {' | '.join(costs)} | ratio |",
        f"|{'---|' * (len(costs) + 2)}",
        *lines,
    ]


def read_passes(log: str) -> list[Pass]:
    """Reconciles in an operator's log of level `debug`."""
    return [Pass(wrote == "True", float(seconds)) for wrote, seconds in _PASS.findall(log)]


def passes_table(passes: Sequence[Pass]) -> list[str]:
    """Duration of passes in milliseconds, by kind, as a Markdown table."""
    kinds = {
        "that write": [each.seconds for each in passes if each.wrote],
        "that do not write": [each.seconds for each in passes if not each.wrote],
        "all": [each.seconds for each in passes],
    }
    return [
        "| passes | number | p50 ms | p99 ms | max ms |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {len(seconds)} | {' | '.join(_quantiles(seconds))} |"
            for kind, seconds in kinds.items()
        ),
    ]


def calls_table(operator: Samples, objects: int) -> list[str]:
    """The operator's API calls (each try counted; its watches are not among them) by verb, with
    their number for each PDCluster.
    """
    by_kind = operator.by(_CALLS, "verb", "kind")
    by_verb = operator.by(_CALLS, "verb")
    rows = []
    for (verb,), number in by_verb.items():
        kinds = _listed(
            {kind: each for (found, kind), each in by_kind.items() if found == verb},
            with_total=False,
        )
        rows.append(f"| {verb} | {number:.0f} | {number / objects:.2f} | {kinds} |")
    total = sum(by_verb.values())
    return [
        "| verb | API calls | for each PDCluster | by kind |",
        "|---|---|---|---|",
        *rows,
        f"| all | {total:.0f} | {total / objects:.2f} | |",
    ]


def answers(operator: Samples) -> dict[str, float]:
    """The operator's API calls by HTTP status; 0 = no answer."""
    return {code: number for (code,), number in operator.by(_CALLS, "code").items()}


def server_writes(server: Samples) -> dict[str, float]:
    """Writes that the API server answered, by resource; of everybody, the bench's own included."""
    sums: defaultdict[str, float] = defaultdict(float)
    for (verb, resource), number in server.by(
        "apiserver_request_total", "verb", "resource"
    ).items():
        if verb in WRITES:
            sums[resource] += number
    return dict(sums)


def _listed(numbers: Mapping[str, float], *, with_total: bool = True) -> str:
    """`3 (a 1, b 2)`; with_total=False: `a 1, b 2`."""
    parts = ", ".join(f"{name} {number:.0f}" for name, number in sorted(numbers.items()))
    if not with_total:
        return parts
    total = f"{sum(numbers.values()):.0f}"
    return f"{total} ({parts})" if parts else total


def _quantiles(seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return ["-", "-", "-"]
    return [
        f"{each * 1000:.1f}"
        for each in (percentile(seconds, 50), percentile(seconds, 99), max(seconds))
    ]
