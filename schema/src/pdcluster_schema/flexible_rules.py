"""Rules of flexible pools: their workers change the role as they run, so nothing that a role's pods
are made with may differ.
"""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.section import Rule

PAIRED = ("prefill", "decode")
_FIX = "leave flexible out"


def flexible_pools(spec: Any, role: str) -> list[Any]:
    declared = spec.roles.present().get(role)
    return [] if declared is None else [pool for pool in declared.pools if pool.flexible]


_IS = "p.?flexible.orValue(false)"
# decode has one where prefill has, by the rule of both
_ANY = f"has(self.roles.prefill) && self.roles.prefill.pools.exists(p, {_IS})"


def _flexible(spec: Any) -> list[Any]:
    return [pool for role in PAIRED for pool in flexible_pools(spec, role)]


def _has_own_engine(spec: Any) -> bool:
    roles = spec.roles.present()
    return any("engine" in roles[role].model_fields_set for role in PAIRED if role in roles)


def flexible_rules() -> Iterator[Rule]:
    for role in ("mixed", "router", "picker"):
        yield Rule(
            cel=f"!has(self.roles.{role}) || self.roles.{role}.pools.all(p, !{_IS})",
            holds=lambda spec, role=role: not flexible_pools(spec, role),  # type: ignore[misc]
            reason="flexible is for prefill and decode workers, which take each other's role",
            fix=_FIX,
            at=f"roles.{role}.pools",
        )
    pools = [f"self.roles.{role}.pools" for role in PAIRED]
    one, none = (
        " && ".join(each.format(pools=every) for every in pools)
        for each in (f"{{pools}}.exists_one(p, {_IS})", f"{{pools}}.all(p, !{_IS})")
    )
    yield Rule(
        cel=f"!has(self.roles.prefill) || !has(self.roles.decode) || {none} || {one}",
        holds=lambda spec: [len(flexible_pools(spec, role)) for role in PAIRED] in ([0, 0], [1, 1]),
        reason="a flexible pool of one role needs one of the other, and a role has one at most",
        fix="set flexible on one pool of prefill and on one of decode, or leave it out",
        at="roles",
    )
    yield from _alike_rules()
    yield Rule(
        cel=f"self.?autoscale.?mode.orValue('Off') == 'On' || !({_ANY})",
        holds=lambda spec: spec.autoscale.mode == "On" or not _flexible(spec),
        reason="must be On with flexible pools, whose workers change their role by its decisions",
        fix=f"set it to On, or {_FIX}",
        at="autoscale.mode",
    )


def _alike_rules() -> Iterator[Rule]:
    """A worker that changes its role keeps its process."""
    yield Rule(
        cel=f"self.?engine.?type.orValue('pdcluster') == 'pdcluster' || !({_ANY})",
        holds=lambda spec: not spec.engine.is_stock or not _flexible(spec),
        reason="must be pdcluster with flexible pools: a stock engine takes another role only by a "
        "restart",
        fix=f"set engine.type: pdcluster, or {_FIX}",
        at="engine.type",
    )
    yield Rule(
        cel="(!has(self.roles.prefill) || !has(self.roles.prefill.engine)) && "
        f"(!has(self.roles.decode) || !has(self.roles.decode.engine)) || !({_ANY})",
        holds=lambda spec: not (_flexible(spec) and _has_own_engine(spec)),
        reason="with flexible pools neither role has an engine of its own, since a worker keeps "
        "its engine in both",
        fix=f"give the values in spec.engine, or {_FIX}",
        at="roles",
    )
    other = _IS.replace("p.", "d.")
    yield Rule(
        cel=f"!has(self.roles.prefill) || !has(self.roles.decode) || "
        f"self.roles.prefill.pools.all(p, !{_IS} || self.roles.decode.pools.all(d, !{other} || "
        "d.gpu == p.gpu && d.?gpusPerReplica.orValue(0) == p.?gpusPerReplica.orValue(0)))",
        holds=lambda spec: len({(p.gpu, p.gpus_per_replica) for p in _flexible(spec)}) < 2,
        reason="the flexible pools must have one gpu and one gpusPerReplica, since a worker keeps "
        "its accelerators in both roles",
        fix=f"make them equal, or {_FIX}",
        at="roles",
    )
    alone = "p.?podsPerReplica.orValue(p.?gpusPerPod.orValue(1)) == 1"
    yield Rule(
        cel=" && ".join(
            f"(!has(self.roles.{role}) || self.roles.{role}.pools.all(p, !{_IS} || {alone}))"
            for role in PAIRED
        ),
        holds=lambda spec: all(_pods(pool) == 1 for pool in _flexible(spec)),
        reason="a worker of a flexible pool is one pod",
        fix=f"leave podsPerReplica and gpusPerPod out, or {_FIX}",
        at="roles",
    )


def _pods(pool: Any) -> int:
    """As many as may be: gpusPerPod divides the ranks of a worker among pods."""
    return int(pool.pods_per_replica or pool.gpus_per_pod or 1)
