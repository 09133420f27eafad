"""The present state in `pdctl why`: sizes, bounds and conditions of a PDCluster.

Objects may be old, partial or written by hand: fields that cannot be read are left out.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pdcluster_api.plan.autoscale.base import bounds_of
from pdcluster_api.plan.autoscale.explain import flipped_text, read_flips
from pdcluster_api.plan.observed.state import Previous, ScalingDecision, mappings
from pdcluster_api.plan.status.autoscaled import FIELD, recorded
from pdcluster_schema import conditions as words
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse_stored
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey
from pdctl.cli.table import WIDTH, table

_SHOWN = ("DECIDED", "DESIRED", "EXIST", "READY")
_COLUMNS = ("POOL", *_SHOWN, "BOUNDS", "LAST CHANGE")
_OF_ROLLOUT = (words.PROGRESS_DEADLINE_EXCEEDED, words.ROLLOUT_PAUSED, words.ROLLED_BACK)
_BELOW = (words.DISCOVERY_READY, *words.ROLE_READY.values())


def present_lines(
    body: Mapping[str, Any], records: Sequence[ScalingDecision], now: datetime
) -> list[str]:
    """A table of pools, then conditions that explain it.  now: for schedules."""
    rows = list(_rows(body, records, now))
    lines = table(_COLUMNS, rows, right=range(1, 1 + len(_SHOWN))) if rows else []
    return [*lines, *_flipped(body), *_blockers(body)]


def _flipped(body: Mapping[str, Any]) -> list[str]:
    """Name workers of flexible pools that serve the other role, or should."""
    return [flipped_text(each) for each in read_flips(_section(_section(body, "status"), FIELD))]


def _blockers(body: Mapping[str, Any]) -> list[str]:
    conditions = Previous(_section(body, "status")).conditions()
    of_scaling = [
        each
        for each in conditions
        if each.get("type") in (*words.AUTOSCALING, words.ROLLOUT_OVER_BUDGET) and _is_true(each)
    ]
    below = [
        each
        for each in conditions
        if each.get("type") in _BELOW
        and not (_is_true(each) and each.get("reason") != words.SCALING)
    ]
    at_zero = [
        each
        for each in conditions
        if each.get("type") == words.READY and each.get("reason") == words.SCALED_TO_ZERO
    ]
    stalled = [each for each in conditions if each.get("type") == words.STALLED and _is_true(each)]
    # what says why, and the way out
    rolled_back = [each for each in stalled if each.get("reason") in _OF_ROLLOUT]
    return [
        line
        for each in (
            *at_zero,
            *of_scaling,
            *rolled_back,
            *(below or ([] if rolled_back else stalled)),
        )
        for line in _condition(each)
    ]


def _is_true(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"


def _condition(condition: Mapping[str, Any]) -> list[str]:
    kind, reason = condition.get("type"), condition.get("reason")
    name = str(kind) if reason in (kind, None) else f"{kind} ({reason})"
    text = (
        f"{name} since {condition.get('lastTransitionTime', 'unknown')}: "
        f"{condition.get('message', '')}"
    )
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _rows(
    body: Mapping[str, Any], records: Sequence[ScalingDecision], now: datetime
) -> Iterator[tuple[str, ...]]:
    status, spec = _section(body, "status"), _spec(body)
    field = _section(status, FIELD)
    decided = recorded(status, str(field.get("mode"))) or {}
    for each in read_flips(field):
        decided |= {key: decided[key] - each.away(key) for key in decided}
    for role in mappings(status.get("roles")):
        for pool in mappings(role.get("pools")):
            key = (str(role.get("name")), str(pool.get("name")))
            numbers = (
                decided.get(key),
                pool.get("desired"),
                pool.get("current"),
                pool.get("ready"),
            )
            shown = ["-" if number is None else str(number) for number in numbers]
            yield ("/".join(key), *shown, _bounds(spec, key, now), _last_change(key, records))


def _bounds(spec: PDClusterSpec | None, key: PoolKey, now: datetime) -> str:
    role = None if spec is None else spec.roles.present().get(key[0])
    pool = (
        None if role is None else next((pool for pool in role.pools if pool.name == key[1]), None)
    )
    if spec is None or pool is None:
        return "-"
    schedules = spec.autoscale.schedules if spec.autoscale.mode != "Off" else ()
    low, high, source = bounds_of(key[0], pool, schedules, now)
    return f"{low} to {high}" + (f" ({source})" if source.startswith("schedule ") else "")


def _last_change(key: PoolKey, records: Sequence[ScalingDecision]) -> str:
    """records: the newest first."""
    for number, record in enumerate(records, start=1):
        steps = [step for step in record.steps if step.subject == "/".join(key)]
        if steps and steps[0].before != steps[-1].after:
            where = "below" if number == 1 else f"--last {number}"
            return (
                f"{record.at.astimezone(UTC):%m-%d %H:%M:%S}: {steps[0].before} to "
                f"{steps[-1].after} ({where})"
            )
    return "none remembered"


def _spec(body: Mapping[str, Any]) -> PDClusterSpec | None:
    try:
        return parse_stored(body)[0].spec
    except InvalidObjectError:
        return None


def _section(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}
