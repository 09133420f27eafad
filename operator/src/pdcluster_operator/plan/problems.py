"""Which problem of a role is told first: the worst of its pods, and how many share it.

Pure and deterministic: what is worst follows from the kind of the problem, then
from names, so that the same pods always tell the same.
"""

from collections.abc import Iterable, Iterator

from pdcluster_operator.api import conditions as words
from pdcluster_operator.plan.drain import ordinal_of
from pdcluster_operator.plan.pools import PoolView, RoleView

_WORST_FIRST = (
    words.INVALID_SPEC,
    words.FORBIDDEN,
    words.NAME_TAKEN,
    words.APPLY_FAILED,
    words.PROGRESS_DEADLINE_EXCEEDED,
    words.CONFIGURATION_REFUSED,
    words.ACCELERATOR_UNUSABLE,
    words.IMAGE_NOT_PULLED,
    words.MODEL_NOT_DOWNLOADED,
    words.CRASH_LOOPING,
    words.QUOTA_EXCEEDED,
    words.PODS_REFUSED,
    words.UNSCHEDULABLE,
    words.ETCD_UNREACHABLE,
    words.DOWNLOADING_MODEL,
    words.ROLLING_OUT,
    words.SCALING,
    words.STARTING,
    words.NOT_ANSWERING,
)
"""What a person must mend, then what passes with help from outside, then what is on its way; NotAnswering only follows from others."""


def rank(reason: str) -> int:
    """Place of a reason, the worst at 0; one that is not known is among those that a person must look at."""
    return _WORST_FIRST.index(reason if reason in _WORST_FIRST else words.APPLY_FAILED)


def worst_of(problems: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """The worst (reason, message); None = there is none."""
    return min(problems, key=lambda problem: (rank(problem[0]), problem), default=None)


def worst_problem(view: RoleView) -> tuple[str, str] | None:
    """(reason, message) of the worst problem of pools that are not ready; None = they are only on their way."""
    found = sorted(
        (rank(reason), name, reason, message, num_workers)
        for pool in view.pools
        if not pool.is_ready
        for name, reason, message, num_workers in _problems(pool)
    )
    if not found:
        return None
    _, _, reason, message, _ = found[0]
    affected = sum(num_workers for _, _, each, _, num_workers in found if each == reason)
    return reason, f"{affected} of {view.wanted} workers: {message}"


def _problems(pool: PoolView) -> Iterator[tuple[str, str, str, int]]:
    """(whose, reason, message, how many workers) of one pool."""
    if pool.target is None:
        return
    if pool.target.fault is not None and pool.target.current < pool.wanted:
        reason, message = pool.target.fault
        yield pool.target.id.name, reason, f"pool {pool.declared.name}: {message}", pool.wanted - pool.target.current
    for pod in pool.target.pods:
        is_leaving = pod.terminating or ordinal_of(pod) >= pool.wanted  # who drains is not ready, and nothing is wrong with that
        if pod.problem is not None and not pod.ready and not is_leaving:
            yield pod.name, *pod.problem, 1
