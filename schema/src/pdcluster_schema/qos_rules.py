"""Rules over `spec.qos` and the engines or keys that its fields are for."""

from collections.abc import Iterator

from pdcluster_schema.engine_rules import value_or_default
from pdcluster_schema.section import Rule
from pdcluster_schema.sections import COMPUTING


def each_role(text: str, joined: str = " && ") -> str:
    """A condition of each role that computes."""
    return joined.join(text.replace("ROLE", role) for role in COMPUTING)


def qos_rules() -> Iterator[Rule]:
    yield Rule(
        cel="size(self.?qos.?tenants.orValue({})) == 0 || self.?service.?apiKeySecret.hasValue()",
        holds=lambda spec: not spec.qos.tenants or spec.service.api_key_secret is not None,
        reason="is for API keys, and no key is asked for",
        fix="give service.apiKeySecret, or leave qos.tenants out",
        at="qos.tenants",
    )
    policy = value_or_default("schedulingPolicy", "self.roles.ROLE")
    yield Rule(
        cel="!self.?qos.?allowClientPriority.orValue(false) || "
        + each_role(f"has(self.roles.ROLE) && {policy} != 'fcfs'", " || "),
        holds=lambda spec: (
            not spec.qos.allow_client_priority
            or any(
                spec.engine_of(role).scheduling_policy != "fcfs" for role in spec.roles.computing()
            )
        ),
        reason="counts for no engine, since schedulingPolicy is fcfs",
        fix="leave it out, or set engine.schedulingPolicy: priority",
        at="qos.allowClientPriority",
    )
    yield Rule(
        cel="self.?qos.?estimation.?lateGroups.orValue('Keep') == 'Keep' || "
        "self.?engine.?type.orValue('pdcluster') == 'pdcluster' && "
        + each_role(f"(!has(self.roles.ROLE) || {policy} != 'fcfs')"),
        holds=lambda spec: (
            spec.qos.estimation.late_groups == "Keep"
            or (
                spec.engine.type == "pdcluster"
                and all(
                    spec.engine_of(role).scheduling_policy != "fcfs"
                    for role in spec.roles.computing()
                )
            )
        ),
        reason="is for engines that let others go first; a stock engine and schedulingPolicy fcfs "
        "do not",
        fix="leave it out, or set engine.type: pdcluster and schedulingPolicy: priority",
        at="qos.estimation.lateGroups",
    )
