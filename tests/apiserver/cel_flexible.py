"""Cases of the rules of flexible pools."""

from tests.schema.object_cases import Change, at, both
from tests.schema.wrong_flexible import DECODE, FLEXIBLE, PREFILL, WRONG_FLEXIBLE

ON_H100 = both(FLEXIBLE, *(at(f"{pool}.gpu", "H100") for pool in (PREFILL, DECODE)))

FLEXIBLE_CASES: list[tuple[Change, Change]] = [
    *((FLEXIBLE, wrong) for wrong, _, _ in WRONG_FLEXIBLE),
    (
        both(ON_H100, *(at(f"{pool}.gpusPerReplica", 2) for pool in (PREFILL, DECODE))),
        both(ON_H100, at(f"{PREFILL}.gpusPerReplica", 2)),
    ),
    (FLEXIBLE, both(FLEXIBLE, at("spec.roles.prefill.engine", {}))),
]
"""A change that a rule lets through, and one that it refuses."""
