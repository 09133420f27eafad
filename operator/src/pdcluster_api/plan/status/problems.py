"""Choose the problem of a role to report: the worst of its pods.  Deterministic."""

from collections.abc import Iterable, Iterator

from pdcluster_api.plan.drain.shrink import ordinal_of
from pdcluster_api.plan.observed.pools import PoolView, RoleView
from pdcluster_api.plan.observed.state import PodState, Problem
from pdcluster_schema import conditions as words

# Needs a user first, then help from outside, then time; NotAnswering only follows from others
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
    words.ETCD_FULL,
    words.QUOTA_EXCEEDED,
    words.PODS_REFUSED,
    words.NODE_LOST,
    words.UNSCHEDULABLE,
    words.ETCD_UNREACHABLE,
    words.DOWNLOADING_MODEL,
    words.ROLLING_OUT,
    words.SCALING,
    words.STARTING,
    words.NOT_ANSWERING,
)


def rank(reason: str) -> int:
    return _WORST_FIRST.index(reason if reason in _WORST_FIRST else words.APPLY_FAILED)


def worst_of(problems: Iterable[Problem]) -> Problem | None:
    """The worst (reason, message); None = there is none."""
    return min(problems, key=lambda problem: (rank(problem.reason), problem), default=None)


def worst_problem(view: RoleView) -> Problem | None:
    """The worst problem of pools that are not ready; None = they are only on their way."""
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
    return Problem(reason, f"{affected} of {view.desired} workers: {message}")


def still_loading(view: RoleView) -> Iterator[str]:
    """The first pod whose stock engine has not served yet, in words, and how many more do so."""
    found = sorted(
        pod.loading
        for pool in view.pools
        for pod in (pool.target.pods if pool.target else ())
        if pod.loading and not _is_leaving(pod, pool)
    )
    if found:
        yield found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def _is_leaving(pod: PodState, pool: PoolView) -> bool:
    """Return whether its not being ready is no problem: it ends, or drains."""
    return pod.terminating or ordinal_of(pod) >= pool.desired


def _problems(pool: PoolView) -> Iterator[tuple[str, str, str, int]]:
    if pool.target is None:
        return
    if pool.target.fault is not None and pool.target.current < pool.desired:
        reason, message = pool.target.fault
        yield (
            pool.target.id.name,
            reason,
            f"pool {pool.declared.name}: {message}",
            pool.desired - pool.target.current,
        )
    for pod in pool.target.pods:
        if pod.problem is not None and not pod.ready and not _is_leaving(pod, pool):
            yield pod.name, *pod.problem, 1
