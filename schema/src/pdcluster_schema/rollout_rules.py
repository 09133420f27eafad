"""Rules of roll outs over other sections: each for us and as CEL."""

from collections.abc import Iterator

from pdcluster_schema.rollout import ROLLING_FIELDS
from pdcluster_schema.section import Rule

_GIVEN = " || ".join(f"self.rollout.?{name}.hasValue()" for name in ROLLING_FIELDS)
NOT_ROLLING = (
    "!(has(self.rollout) && (has(self.rollout.strategy) ? self.rollout.strategy == 'Rolling' : "
    f"({_GIVEN})))"
)
"""CEL of an object that asks for another strategy, or for none."""


def rollout_rules() -> Iterator[Rule]:
    yield Rule(
        cel=f"{NOT_ROLLING} || !has(self.roles.picker)",
        holds=lambda spec: not spec.rollout.implies_rolling or spec.roles.picker is None,
        reason="Rolling is for clusters without pickers of their own, which lead to workers of one "
        "revision alone",
        fix="set BlueGreen without fields of Rolling, or leave roles.picker out",
        at="rollout.strategy",
    )
    yield _attainment_rule()


def _attainment_rule() -> Rule:
    names = ("objective.?ttft", "objective.?itl", "prefill.?ttftSeconds", "decode.?tpotSeconds")
    given = " || ".join(f"self.?autoscale.?{name}.hasValue()" for name in names)
    return Rule(
        cel="!self.?rollout.?minRequests.hasValue() || "
        f"self.?autoscale.?mode.orValue('Off') != 'Off' && ({given})",
        holds=lambda spec: (
            spec.rollout.min_requests is None
            or (spec.autoscale.mode != "Off" and spec.autoscale.has_latency_objective)
        ),
        reason="asks for latencies that nothing reads, or that have no objective",
        fix="set autoscale.mode to Advise or On and give autoscale.objective.ttft or itl, or leave "
        "it out",
        at="rollout.minRequests",
    )
