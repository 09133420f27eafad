"""docs/gitops/pdcluster-health.lua, run by the Lua that Argo CD has (5.1), over objects as the
operator leaves them.
"""

from pathlib import Path
from typing import Any

import pytest
from lupa import lua51

from pdcluster_schema import conditions

SCRIPT = (Path(__file__).parents[2] / "docs" / "gitops" / "pdcluster-health.lua").read_text()


def health(obj: dict[str, Any]) -> tuple[str, str]:
    """Status and message, from a fresh interpreter that has the libraries of Argo CD's: no io, no
    os.
    """
    lua = lua51.LuaRuntime(unpack_returned_tuples=True)
    for library in ("io", "os", "require", "dofile", "loadfile", "package", "python"):
        lua.globals()[library] = None
    lua.globals()["obj"] = lua.table_from(obj, recursive=True)
    found = lua.execute(SCRIPT)
    return found["status"], found["message"]


def condition(type_: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 2,
    }


def pdcluster(*found: dict[str, Any], observed: int = 2) -> dict[str, Any]:
    """A PDCluster of generation 2 with these conditions."""
    return {
        "metadata": {"name": "chat", "generation": 2},
        "status": {"observedGeneration": observed, "conditions": list(found)},
    }


SERVING = condition(
    conditions.SERVING, "True", conditions.ANSWERING, "1 of 1 decode workers answer"
)
READY = condition(
    conditions.READY, "True", conditions.AS_DECLARED, "1 prefill and 1 decode workers are ready"
)
STARTING = condition(
    conditions.READY, "False", conditions.STARTING, "0 of 1 decode workers are ready"
)
ROLLING = condition(
    conditions.READY, "False", conditions.ROLLING_OUT, "revision 1a2b3c4d starts beside 5e6f7a8b"
)
RECONCILING = condition(
    conditions.RECONCILING,
    "True",
    conditions.ROLLING_OUT,
    "revision 1a2b3c4d starts beside 5e6f7a8b",
)
NOT_RECONCILING = condition(conditions.RECONCILING, "False", conditions.AS_DECLARED, "")
PULL = condition(
    conditions.READY, "False", conditions.IMAGE_NOT_PULLED, "pod chat-0: no such image"
)
STALLED = condition(
    conditions.STALLED, "True", conditions.IMAGE_NOT_PULLED, "pod chat-0: no such image"
)
UNSCHEDULABLE = condition(
    conditions.READY, "False", conditions.UNSCHEDULABLE, "0/3 nodes are available"
)

TABLE = {
    "no status": (
        {"metadata": {"generation": 1}},
        "Progressing",
        "waits for the operator: is it running, and does it watch this namespace?",
    ),
    "new": (
        {"metadata": {"generation": 1}, "status": {"observedGeneration": -1}},
        "Progressing",
        "waits for the operator: is it running, and does it watch this namespace?",
    ),
    "no conditions": (
        {"metadata": {"generation": 1}, "status": {"observedGeneration": 1}},
        "Progressing",
        "waits for the operator: is it running, and does it watch this namespace?",
    ),
    "ready": (
        pdcluster(SERVING, READY),
        "Healthy",
        "AsDeclared: 1 prefill and 1 decode workers are ready",
    ),
    "ready, of the spec before": (
        pdcluster(SERVING, READY, observed=1),
        "Progressing",
        "waits for the operator to see the last change",
    ),
    "stalled, of the spec before": (
        pdcluster(PULL, STALLED, observed=1),
        "Progressing",
        "waits for the operator to see the last change",
    ),
    "starting": (pdcluster(STARTING), "Progressing", "Starting: 0 of 1 decode workers are ready"),
    "rolling out while it serves": (
        pdcluster(SERVING, ROLLING, RECONCILING),
        "Progressing",
        "RollingOut: revision 1a2b3c4d starts beside 5e6f7a8b",
    ),
    "reconciling outweighs ready": (
        pdcluster(READY, RECONCILING),
        "Progressing",
        "RollingOut: revision 1a2b3c4d starts beside 5e6f7a8b",
    ),
    "a false reconciling does not": (
        pdcluster(READY, NOT_RECONCILING),
        "Healthy",
        "AsDeclared: 1 prefill and 1 decode workers are ready",
    ),
    "stalled": (pdcluster(PULL, STALLED), "Degraded", "ImageNotPulled: pod chat-0: no such image"),
    "stalled outweighs reconciling": (
        pdcluster(STALLED, RECONCILING, PULL),
        "Degraded",
        "ImageNotPulled: pod chat-0: no such image",
    ),
    "what passes by waiting": (
        pdcluster(SERVING, UNSCHEDULABLE),
        "Progressing",
        "Unschedulable: 0/3 nodes are available",
    ),
    "no conditions at all yet": (pdcluster(), "Progressing", "is not ready yet"),
    "a condition without words": (
        pdcluster({"type": "Stalled", "status": "True"}),
        "Degraded",
        "needs a user",
    ),
    "an unknown status": (
        pdcluster(condition("Ready", "Unknown", "", "")),
        "Progressing",
        "is not ready yet",
    ),
    "deleted": (
        {
            **pdcluster(READY),
            "metadata": {"generation": 2, "deletionTimestamp": "2026-01-01T00:00:00Z"},
        },
        "Progressing",
        "is being deleted",
    ),
}


@pytest.mark.parametrize(("obj", "status", "message"), TABLE.values(), ids=TABLE)
def test_argo_health(obj: dict[str, Any], status: str, message: str) -> None:
    assert health(obj) == (status, message)


@pytest.mark.parametrize("reason", sorted(conditions.NEEDS_ACTION))
def test_every_reason_that_needs_a_user_is_degraded(reason: str) -> None:
    assert health(pdcluster(SERVING, condition(conditions.STALLED, "True", reason, "see it"))) == (
        "Degraded",
        f"{reason}: see it",
    )
