"""Rules of a cluster whose pools may all go to zero: routers hold its requests meanwhile, for as
long as a worker takes to start.
"""

from collections.abc import Iterator

from pdcluster_schema.qos_rules import each_role
from pdcluster_schema.rollout_rules import NOT_ROLLING
from pdcluster_schema.section import Rule


def sleep_rules() -> Iterator[Rule]:
    is_awake = (
        "(has(self.roles.ROLE) && self.roles.ROLE.pools.exists(p, p.?minReplicas.orValue(1) != 0))"
    )
    guard = f"self.?autoscale.?mode.orValue('Off') != 'On' || {each_role(is_awake, ' || ')} || "
    yield Rule(
        cel=f"{guard}has(self.roles.router) && !has(self.roles.picker)",
        holds=lambda spec: (
            not spec.may_sleep or (spec.roles.router is not None and spec.roles.picker is None)
        ),
        reason="is On and minReplicas of all pools is 0, which needs routers that hold requests "
        "while none runs, and no picker, which cannot",
        fix="give roles.router without roles.picker, or minReplicas 1 to a pool",
        at="autoscale.mode",
    )
    yield Rule(
        cel=f"{guard}self.?qos.?admission.?workerWaitSeconds.orValue(0.0) > 0.0",
        holds=lambda spec: not spec.may_sleep or spec.qos.admission.worker_wait_seconds > 0.0,
        reason="is 0, so a request that finds all pools at zero, as autoscale.mode On with "
        "minReplicas 0 lets them be, would be refused",
        fix="set it to the time in which a worker starts, such as 300, or minReplicas 1 of a pool",
        at="qos.admission.workerWaitSeconds",
    )
    yield Rule(
        cel=f"{guard}{NOT_ROLLING}",
        holds=lambda spec: not spec.may_sleep or not spec.rollout.implies_rolling,
        reason="Rolling takes routers away for a while, which a cluster needs whose pools all have "
        "minReplicas 0 under autoscale.mode On",
        fix="set BlueGreen without fields of Rolling, or minReplicas 1 of a pool",
        at="rollout.strategy",
    )
