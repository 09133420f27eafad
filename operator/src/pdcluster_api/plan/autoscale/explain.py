"""A decision as rows of a table, and as a bounded entry of `status.autoscaling.lastDecisions[]`."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from pdcluster_api.plan.autoscale.values import short
from pdcluster_api.plan.observed.state import DecisionInput, DecisionStep, Problem, ScalingDecision
from pdcluster_schema.text import shortened

MAX_DECISIONS = 10
MAX_INPUTS = 32
MAX_STEPS = 64
MAX_PROBLEMS = 16
MAX_TEXT = 300  # characters

COLUMNS = ("ROLE", "RULE", "FROM", "TO", "WHY")


def explained(decision: ScalingDecision) -> list[tuple[str, ...]]:
    """Rows below `COLUMNS`."""
    roles = list(dict.fromkeys(role for role, _ in decision.replicas))
    rows = [row for role in roles for row in _of_role(role, decision)]
    return [
        *rows,
        *(("-", "problem", "", "", f"{each.reason}: {each.message}") for each in decision.problems),
    ]


def _of_role(role: str, decision: ScalingDecision) -> Iterator[tuple[str, ...]]:
    for each in decision.inputs:
        if each.subject == role:
            limit = "" if each.limit is None else f", threshold {_number(each.limit)}"
            yield role, "sees", "", "", f"{each.name} {_number(each.value)}{limit}"
    for step in decision.steps:
        if step.subject.partition("/")[0] == role:
            yield step.subject, step.rule, str(step.before), str(step.after), step.why
    sizes = {pool: replicas for (each, pool), replicas in decision.replicas.items() if each == role}
    why = ", ".join(f"{pool} {replicas}" for pool, replicas in sizes.items())
    yield role, "result", "", str(sum(sizes.values())), why


def _number(value: float | None) -> str:
    return short(value) if value is None or abs(value) >= 1000.0 else f"{value:.4g}"


def summary(decision: ScalingDecision) -> str:
    """One line for an event: changed pools, by their steps.  Empty = nothing changed.

    >>> step = DecisionStep("pool", "prefill/b200", 4, 5, "the cheapest")
    >>> summary(ScalingDecision({("prefill", "b200"): 5}, steps=(step,)))
    'prefill/b200 4 to 5'
    """
    first, last = dict[str, int](), dict[str, int]()
    for step in decision.steps:
        if "/" in step.subject:
            first.setdefault(step.subject, step.before)
            last[step.subject] = step.after
    return ", ".join(
        f"{pool} {first[pool]} to {last[pool]}" for pool in first if first[pool] != last[pool]
    )


def remembered(entries: object, decision: ScalingDecision) -> list[dict[str, Any]]:
    old = entries if isinstance(entries, list | tuple) else []
    kept = [entry for entry in old if read_record(entry) is not None]
    return [write_record(decision), *kept[: MAX_DECISIONS - 1]]


def write_record(decision: ScalingDecision) -> dict[str, Any]:
    """As one entry of the status.  The time is kept in whole seconds of UTC."""
    inputs = map(asdict, decision.inputs[:MAX_INPUTS])
    return {
        "at": decision.at.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z",
        "replicas": [
            {"role": role, "pool": pool, "replicas": number}
            for (role, pool), number in decision.replicas.items()
        ],
        "inputs": [
            {name: value for name, value in each.items() if value is not None} for each in inputs
        ],
        "steps": [
            asdict(replace(step, why=shortened(step.why, MAX_TEXT)))
            for step in decision.steps[:MAX_STEPS]
        ],
        "problems": [
            {"reason": each.reason, "message": shortened(each.message, MAX_TEXT)}
            for each in decision.problems[:MAX_PROBLEMS]
        ],
    }


_INPUTS = TypeAdapter(tuple[DecisionInput, ...])
_STEPS = TypeAdapter(tuple[DecisionStep, ...])


def read_record(entry: Any) -> ScalingDecision | None:
    """Read what `write_record` wrote; None = another program wrote it."""
    try:
        sizes = entry["replicas"]
        # the API server drops a value that is null
        inputs = [{"value": None, **each} for each in entry["inputs"]]
        return ScalingDecision(
            {(str(each["role"]), str(each["pool"])): int(each["replicas"]) for each in sizes},
            _INPUTS.validate_python(inputs),
            _STEPS.validate_python(entry["steps"]),
            tuple(Problem(each["reason"], each["message"]) for each in entry["problems"]),
            datetime.fromisoformat(entry["at"]).astimezone(UTC),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
