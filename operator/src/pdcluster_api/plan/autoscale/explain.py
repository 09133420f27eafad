"""A decision as rows of a table, and as a bounded entry of `status.autoscaling.lastDecisions[]`."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.values import short
from pdcluster_api.plan.observed.state import (
    DecisionInput,
    DecisionStep,
    Flipped,
    Problem,
    ScalingDecision,
    mappings,
)
from pdcluster_schema.text import shortened
from pdcluster_schema.values import MAX_REPLICAS

MAX_DECISIONS = 10
MAX_INPUTS = 32
MAX_STEPS = 64
MAX_PROBLEMS = 16
MAX_TEXT = 300  # characters

COLUMNS = ("ROLE", "RULE", "FROM", "TO", "WHY")


_FLIPS = {
    rules.FLIP: "a worker changes its role",
    rules.FLIP_BACK: "a worker takes its own role again",
}


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
    sizes = {key[1]: decision.serving(key) for key in decision.replicas if key[0] == role}
    why = ", ".join(f"{pool} {replicas}" for pool, replicas in sizes.items())
    if decision.flipped is not None and role in (decision.flipped.home[0], decision.flipped.to[0]):
        why += f"; {flipped_text(decision.flipped)}"
    yield role, "result", "", str(sum(sizes.values())), why


def flipped_text(flipped: Flipped) -> str:
    """As text.

    >>> flipped_text(Flipped(("prefill", "a"), ("decode", "b"), 1))
    '1 worker of prefill/a serves as decode/b'
    """
    home, to = "/".join(flipped.home), "/".join(flipped.to)
    workers = "1 worker" if flipped.workers == 1 else f"{flipped.workers} workers"
    return f"{workers} of {home} {'serves' if flipped.workers == 1 else 'serve'} as {to}"


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
    changed = [pool for pool in first if first[pool] != last[pool]]
    by_rule = dict.fromkeys(step.rule for step in decision.steps if step.rule in _FLIPS)
    changes = [f"{pool} {first[pool]} to {last[pool]}" for pool in changed]
    return ", ".join([*changes, *(_FLIPS[rule] for rule in by_rule)])


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
        **({"flipped": [write_flipped(decision.flipped)]} if decision.flipped else {}),
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


def write_flipped(flipped: Flipped) -> dict[str, Any]:
    role, pool = flipped.home
    return {"role": role, "pool": pool, "servesPool": flipped.to[1], "workers": flipped.workers}


def read_flipped(entry: Mapping[str, Any]) -> Flipped:
    """Raises KeyError, TypeError or ValueError for what `write_flipped` did not write."""
    role = str(entry["role"])
    other = {"prefill": "decode", "decode": "prefill"}[role]
    pools = (role, str(entry["pool"])), (other, str(entry["servesPool"]))
    return Flipped(*pools, min(max(0, int(entry["workers"])), MAX_REPLICAS))


def read_flips(field: Mapping[str, Any]) -> Iterator[Flipped]:
    """Flips of `status.autoscaling`; entries that cannot be read are left out."""
    for entry in mappings(field.get("flipped")):
        with suppress(KeyError, TypeError, ValueError):
            yield read_flipped(entry)


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
            next(map(read_flipped, entry.get("flipped", ())), None),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
