"""Severity of a condition in words, for the page of a worker."""

import pytest

from pdcluster_schema.conditions import severity_of


@pytest.mark.parametrize(
    ("condition", "severity"),
    [
        (("Ready", "True", "AsDeclared"), "fine"),
        (("PrefillReady", "False", "Unschedulable"), "problem"),
        (("PrefillReady", "False", "CrashLooping"), "needs action"),
        (("PrefillReady", "False", "Starting"), "on the way"),
        (("PrefillReady", "True", "UnknownEngineVersion"), "fine"),
        (("Reconciling", "True", "EtcdUnreachable"), "on the way"),
        (("Stalled", "True", "EtcdUnreachable"), "needs action"),
        (("CapacityShort", "True", "CapacityShort"), "problem"),
        (("CapacityShort", "False", "CapacityShort"), "fine"),
        (("KVTransferVerified", "Unknown", "NotVerified"), "unknown"),
        (("OfANewerOperator", "False", "Whatever"), "problem"),
        (("OfANewerOperator", "?", "Whatever"), "unknown"),
    ],
)
def test_severity_follows_from_type_status_and_reason(
    condition: tuple[str, str, str], severity: str
) -> None:
    assert severity_of(*condition) == severity
