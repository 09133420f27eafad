"""Rules over several sections of a PDCluster.

The API server checks all rules at each write, of a status too, and each field that a rule reads
costs it a copy of the schemas of all fields beside that one.  So a rule reads a role or an engine
once, as the only one of a list or as none (`[?self.roles.?prefill].all(role, ...)`), and first
what mostly decides.  No list holds an optional section itself (`[self.?engine]`): a null below it
would no longer mean that the field is left out.  Rules that speak of an old value hold for changes
only.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic.alias_generators import to_camel, to_snake

from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.adapter_rules import adapter_rules
from pdcluster_schema.engine_rules import engine_rule, engine_rules, given, value_or_default
from pdcluster_schema.flexible_rules import flexible_rules
from pdcluster_schema.kv_tier_rules import kv_tier_rules
from pdcluster_schema.other_model_rules import other_model_rules
from pdcluster_schema.ports import MAX_ENGINES, MAX_RANKS
from pdcluster_schema.precision_rule import precision_rule
from pdcluster_schema.qos_rules import each_role, qos_rules
from pdcluster_schema.rollout_rules import rollout_rules
from pdcluster_schema.routing import PREFILL_PARTS
from pdcluster_schema.section import Cel, Rule
from pdcluster_schema.sections import COMPUTING, ROLES
from pdcluster_schema.service import discovery_rules
from pdcluster_schema.sleep_rules import sleep_rules
from pdcluster_schema.stock_engine import PDCLUSTER_ONLY, STOCK_ONLY
from pdcluster_schema.stock_rules import front_end_rules, sglang_rules, stock_rules
from pdcluster_schema.values import is_label
from pdcluster_schema.workload import (
    MAX_GROUPED_NAME,
    MAX_WORKLOAD_NAME,
    REVISION_LENGTH,
    workload_name,
)

_KNOWN = sorted(accelerators(), key=lambda name: (name.islower(), name))
_TYPES = f"{', '.join(_KNOWN[:-1])} and {_KNOWN[-1]}, or be defined in spec.accelerators"


def object_rules() -> Iterator[Cel]:
    """Rules of the whole object: names of workloads, which a StatefulSet's name has to hold."""
    yield is_label("self.metadata.name", ".metadata.name")
    for role in ROLES:
        most = MAX_WORKLOAD_NAME - len(workload_name("", role, "", "0" * REVISION_LENGTH))
        yield Cel(
            f"!has(self.spec.roles.{role}) || self.spec.roles.{role}.pools.all(p, "
            f"size(self.metadata.name) + size(p.name) <= {most})",
            f"metadata.name and the name of each {role} pool may have at most {most} characters "
            "together: shorten one of them",
            ".metadata.name",
        )
    yield Cel(
        "!has(self.spec.service) || !has(self.spec.service.models) || "
        "self.spec.service.models.all(m, m.cluster != self.metadata.name)",
        "models are of other PDClusters, and one names this one: name another cluster, or remove "
        "the model",
        ".spec.service.models",
    )
    for role in COMPUTING:
        most = MAX_GROUPED_NAME - len(workload_name("", role, "", "0" * REVISION_LENGTH))
        yield Cel(
            f"!has(self.spec.roles.{role}) || self.spec.roles.{role}.pools.all(p, "
            "p.?podsPerReplica.orValue(p.?gpusPerPod.orValue(1)) == 1 || "
            f"size(self.metadata.name) + size(p.name) <= {most})",
            f"metadata.name and the name of each {role} pool whose workers are of several pods may "
            f"have at most {most} characters together: shorten one of them",
            ".metadata.name",
        )


def spec_rules() -> Iterator[Cel | Rule]:
    """Rules of the spec."""
    yield from _accelerator_rules()
    yield from _pair_rules()
    yield precision_rule()
    yield from _rank_rules()
    for role in COMPUTING:
        yield from engine_rules(role)
        yield from kv_tier_rules(role)
    yield from _one_role_rules()
    yield from qos_rules()
    yield _picker_rule()
    yield from other_model_rules()
    yield from adapter_rules()
    yield from rollout_rules()
    yield from _stock_engine_rules()
    yield from front_end_rules()
    yield from stock_rules()
    yield from sglang_rules()
    yield from _autoscale_rules()
    yield from sleep_rules()
    yield from _mixed_rules()
    yield from flexible_rules()
    yield from discovery_rules()


def _of_type(name: str) -> str:
    known = ", ".join(f"'{each}'" for each in _KNOWN)
    return f"{name} in [{known}] || (has(self.accelerators) && {name} in self.accelerators)"


def _accelerator_rules() -> Iterator[Cel]:
    for role in COMPUTING:
        yield Cel(
            f"!has(self.roles.{role}) || self.roles.{role}.pools.all(p, {_of_type('p.gpu')})",
            f"gpu must be one of {_TYPES}",
            f".roles.{role}.pools",
        )


def _both(spec: Any, field: str) -> tuple[Any, Any]:
    """A field of both engines of a pair; the same twice where there is no pair."""
    found = [getattr(spec.engine_of(role), field) for role in spec.roles.computing()]
    return found[0], found[-1]


def _pair_rules() -> Iterator[Rule]:
    """Both ends of a transfer hold the same model and dtype, which are given once, and the same
    kind of cache.
    """
    prefill, decode = "roles.prefill", "roles.decode"
    for field, reason in (
        ("blockSize", "must be that of prefill, since KV blocks move between roles"),
        ("kvCacheDtype", "must be that of prefill, since KV blocks move between roles"),
        (
            "batchInvariant",
            "must be that of prefill, since a remote prefill gives the same bits as a local one",
        ),
    ):
        one, other = value_or_default(field, prefill), value_or_default(field, decode)
        condition = f"{one} == {other}"
        if field == "kvCacheDtype":  # two texts without a known length cost the API server too much
            condition = f"['bf16', 'fp8_e4m3', 'int8'].all(v, ({one} == v) == ({other} == v))"
        yield _pair_rule(field, condition, lambda one, other: one == other, reason)
    tensor = "tensorParallelSize"
    p, d = value_or_default(tensor, prefill), value_or_default(tensor, decode)
    yield _pair_rule(
        tensor,
        f"{p} % {d} == 0 || {d} % {p} == 0",
        lambda one, other: max(one, other) % min(one, other) == 0,
        "must divide that of prefill or be a multiple of it, since KV heads move between roles in "
        "whole slices",
    )


def _pair_rule(field: str, condition: str, holds: Callable[[Any, Any], bool], reason: str) -> Rule:
    name, prefill, decode = to_snake(field), "roles.prefill", "roles.decode"
    return Rule(
        cel=f"[self.roles].all(roles, !has({prefill}) || !has({decode}) || "
        f"!has({prefill}.engine) && !has({decode}.engine) || {condition})",
        holds=lambda spec: holds(*_both(spec, name)),
        reason=reason,
        fix=f"correct {field} of one of them",
        at=f"{decode}.engine.{field}",
        found=lambda spec: "{1} for decode and {0} for prefill".format(*_both(spec, name)).lower(),
    )


def _rank_rules() -> Iterator[Cel]:
    tensor, pipeline, data = "tensorParallelSize", "pipelineParallelSize", "dataParallelSize"
    # number of a pool's pods, and of a stock engine's ranks and of ours in each
    pods = "p.?podsPerReplica.orValue(p.?gpusPerPod.optMap(g, (ranks + g - 1) / g).orValue(1))"
    is_ours = "self.?engine.?type.orValue('pdcluster') == 'pdcluster'"

    def of_pools(condition: str) -> str:
        ranks = (
            f"{value_or_default(tensor, 'self.roles.ROLE')} * "
            f"{value_or_default(pipeline, 'self.roles.ROLE')} * "
            f"({is_ours} ? 1 : {value_or_default(data, 'self.roles.ROLE')})"
        )
        return each_role(
            f"(!has(self.roles.ROLE) || [{ranks}].all(ranks, self.roles.ROLE.pools.all(p, "
            f"[{pods}].all(pods, {condition}))))"
        )

    yield Cel(
        of_pools(
            f"({is_ours} ? ranks : ranks % pods == 0 ? ranks / pods : 1024) <= "
            f"p.?gpusPerPod.orValue({MAX_RANKS})"
        ),
        f"engine.{tensor} times engine.{pipeline}, and engine.{data} of type vllm, must be at "
        f"most {MAX_RANKS} in each pod, or gpusPerPod, and for a stock engine a multiple of "
        "podsPerReplica: lower one of them, or give pools another podsPerReplica",
        ".roles",
    )
    yield Cel(
        of_pools(
            f"[{value_or_default(data, 'self.roles.ROLE')}].all(data, {is_ours} ? "
            f"data <= {MAX_ENGINES} && (pods == 1 || data == pods) : "
            "data % pods == 0 || pods % data == 0)"
        ),
        f"engine.dataParallelSize must be at most {MAX_ENGINES}, and podsPerReplica where that is "
        "given, since each pod has one of the engines of a worker; for a stock engine a multiple "
        "or a divisor of podsPerReplica: set it to that, or leave podsPerReplica out",
        ".roles",
    )
    yield Cel(
        of_pools(
            "!has(p.gpusPerReplica) || (p.gpu == 'cpu' ? p.gpusPerReplica == 1 : "
            "p.gpusPerReplica % pods == 0 && "
            f"p.gpusPerReplica <= pods * p.?gpusPerPod.orValue({MAX_RANKS}) && "
            f"p.gpusPerReplica >= ranks * ({is_ours} ? pods : 1))"
        ),
        f"gpusPerReplica must be at least engine.{tensor} times engine.{pipeline}, and "
        f"engine.{data} of type vllm, on pools with an accelerator, at most {MAX_RANKS} or "
        "gpusPerPod in each pod, and a multiple of podsPerReplica: correct it, or leave it out",
        ".roles",
    )


def _one_role_rules() -> Iterator[Rule]:
    """Sections that are of use to one role, or with another section, alone."""
    delayer = "prefillDelayer.optMap(delayer, delayer.?enabled.orValue(true))"
    yield engine_rule(
        "decode",
        "prefillDelayer",
        f"!{given(delayer)}.orValue(false)",
        lambda engine, _: engine.prefill_delayer is None or not engine.prefill_delayer.enabled,
        (
            "is for prefill and mixed workers, and this holds for decode",
            "set it in roles.prefill.engine, or enabled: false for decode",
        ),
    )
    method = "speculation.optMap(speculation, speculation.?method.orValue('ngram'))"
    yield engine_rule(
        "prefill",
        "speculation",
        f"{given(method)}.orValue('Off') == 'Off'",
        lambda engine, _: engine.speculation is None or engine.speculation.method == "Off",
        (
            "is for decode and mixed workers, and this holds for prefill",
            'set it in roles.decode.engine, or method: "Off" for prefill',
        ),
    )
    yield Rule(
        cel="!(self.?routing.?relaying.?enabled.orValue(false)) || has(self.roles.router)",
        holds=lambda spec: not spec.routing.relaying.enabled or spec.roles.router is not None,
        reason="is for routers, and there are none",
        fix="give roles.router, or leave routing.relaying out",
        at="routing.relaying",
    )
    yield Rule(
        cel="self.?routing.?branches.orValue('Local') == 'Local' || "
        "self.?engine.?type.orValue('pdcluster') == 'pdcluster'",
        holds=lambda spec: spec.routing.branches == "Local" or spec.engine.type == "pdcluster",
        reason="Spread is for engines that give their KV to another decode worker; a stock engine "
        "does not",
        fix="leave it out, or set engine.type: pdcluster",
        at="routing.branches",
    )


def _picker_rule() -> Rule:
    own = "self.?service.?endpointPicker.optMap(p, !p.?name.hasValue()).orValue(false)"
    return Rule(
        cel=f"has(self.roles.picker) == {own}",
        holds=lambda spec: (spec.roles.picker is not None) == spec.service.has_own_picker,
        reason="needs roles.picker where it has no name, and roles.picker needs it so",
        fix="give both endpointPicker: {} and roles.picker, or the name of a picker of yours",
        at="service.endpointPicker",
    )


def _stock_engine_rules() -> Iterator[Cel]:
    """A field of the other type of engine would look as if it held."""
    kind = "engine.?type.orValue('pdcluster')"
    sections = [("self.?engine", ".engine", kind)]
    sections += [
        (f"self.roles.?{role}.?engine", f".roles.{role}", f"self.?{kind}") for role in COMPUTING
    ]
    ours, stock = (
        " || ".join(f"engine.?{field}.hasValue()" for field in fields)
        for fields in (PDCLUSTER_ONLY, STOCK_ONLY)
    )
    for engine, path, type_of in sections:
        yield Cel(
            f"[?{engine}].all(engine, {type_of} == 'pdcluster' || !({ours}))",
            f"a stock engine has none of {', '.join(PDCLUSTER_ONLY)}: leave them out, or give its "
            "own flags in engine.args",
            path,
        )
        yield Cel(
            f"[?{engine}].all(engine, !({stock}) || {type_of} != 'pdcluster')",
            f"engine.{', '.join(STOCK_ONLY[:-1])} and {STOCK_ONLY[-1]} are for a stock engine: "
            "leave them out, or set engine.type: vllm",
            path,
        )
    image = "(!has(self.roles.ROLE) || self.roles.ROLE.?engine.?image.hasValue())"
    yield Cel(
        f"self.?{kind} == 'pdcluster' || self.?engine.?image.hasValue() || {each_role(image)}",
        "image is missing, and a stock engine needs it on Kubernetes: give one of its images, like "
        "vllm/vllm-openai:v0.32.0",
        ".engine",
    )


def _autoscale_rules() -> Iterator[Cel | Rule]:
    """A schedule or a limit that speaks of nothing would look as if it held."""
    pool = (
        "(s.role == 'ROLE' && has(self.roles.ROLE) && "
        "self.roles.ROLE.pools.exists(p, p.name == s.pool))"
    )
    yield Cel(
        "!has(self.autoscale) || !has(self.autoscale.schedules) || "
        f"self.autoscale.schedules.all(s, {each_role(pool, ' || ')})",
        "role and pool must name one of spec.roles' pools: correct the name, or remove the "
        "schedule",
        ".autoscale.schedules",
    )
    budget = "!has(self.autoscale) || !has(self.autoscale.budget) || "
    for guard, field in ((budget, "budget.perGpu"), ("!has(self.autoscale) || ", "cost")):
        yield Cel(
            f"{guard}!has(self.autoscale.{field}) || "
            f"self.autoscale.{field}.all(g, {_of_type('g')})",
            f"each type must be one of {_TYPES}",
            f".autoscale.{field}",
        )
    # a gauge that is stuck must not ask for machines without end
    limited = "(!has(self.roles.ROLE) || self.roles.ROLE.pools.all(p, has(p.maxReplicas)))"
    yield Rule(
        cel="!has(self.autoscale) || self.autoscale.mode != 'On' || (has(self.autoscale.budget) && "
        f"has(self.autoscale.budget.total)) || ({each_role(limited)})",
        holds=lambda spec: (
            spec.autoscale.mode != "On"
            or spec.autoscale.budget.total is not None
            or not _unlimited(spec)
        ),
        reason="is On, which needs maxReplicas in each pool",
        fix="give maxReplicas to every pool, or set autoscale.budget.total",
        at="autoscale.mode",
        found=lambda spec: f"pool {_unlimited(spec)[0]} without it",
    )


def _unlimited(spec: Any) -> list[str]:
    """Pools whose workers compute, without maxReplicas."""
    return [
        f"{role}/{pool.name}"
        for role, declared in spec.roles.computing().items()
        for pool in declared.pools
        if pool.max_replicas is None
    ]


def _mixed_rules() -> Iterator[Rule]:
    """Lines of prefill, a ratio and routing of prefills would look as if they held."""
    unrouted = "means nothing beside mixed workers, which prefill what they decode"
    for section, name, reason, fix in (
        *(("routing", name, unrouted, "remove it") for name in PREFILL_PARTS),
        (
            "placement",
            "min_transfer_gbps",
            "means nothing beside mixed workers, which move no KV between pools",
            "remove it",
        ),
        (
            "autoscale",
            "prefill",
            "means nothing beside mixed workers, which are one role",
            "remove it, they go by the thresholds of autoscale.decode",
        ),
        (
            "autoscale",
            "ratio",
            "means nothing beside mixed workers, which are one role",
            "remove it",
        ),
    ):
        path = f"{section}.{'minTransferGBps' if section == 'placement' else to_camel(name)}"
        yield Rule(
            cel=f"!has(self.roles.mixed) || !has(self.{section}) || !has(self.{path})",
            holds=partial(_is_left_out, section, name),
            reason=reason,
            fix=fix,
            at=path,
        )


def _is_left_out(section: str, name: str, spec: Any) -> bool:
    """Return whether a field is not given beside mixed workers; null gives none."""
    given = getattr(spec, section)
    if spec.roles.mixed is None or given is None or name not in given.model_fields_set:
        return True
    return getattr(given, name) is None
