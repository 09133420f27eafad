"""A schedule under the prefill delayer: asks it once, and lets waiting requests in or not."""

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.prefill_delayer import PrefillDelayer, Pressure
from pdcluster_worker.engine.request import Status
from pdcluster_worker.engine.scheduler import Schedule, Scheduler


def delayed_schedule(
    scheduler: Scheduler,
    delayer: PrefillDelayer | None,
    pool: BlockPool,
    max_running: int,
    now: float,
) -> Schedule:
    """Plan the next step; without a delayer the scheduler alone decides.

    A preempted request has begun: it is not held back, nor what fits into its step.
    """
    if delayer is None:
        return scheduler.schedule()
    pressure = Pressure(
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running) + len(scheduler.ready),
        max_running=max_running,
        is_continuing=scheduler.is_prefilling,
        usage=1 - pool.num_available / pool.num_blocks,
    )
    allows = delayer.begin(pressure, now)
    has_begun = bool(scheduler.waiting) and scheduler.waiting[0].status is Status.PREEMPTED
    return scheduler.schedule(admit=allows or has_begun)
