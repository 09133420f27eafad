"""Rules over several sections of a PDCluster, as the API server checks them.

It checks all rules at each write, of a status too, and each field that a rule reads costs it a
copy of the schemas of all fields beside that one.  So a rule reads a role or an engine once, as
the only one of a list or as none (`[?self.roles.?prefill].all(role, ...)`), and first what mostly
decides.  No list holds an optional section itself (`[self.?engine]`): a null below it would no
longer mean that the field is left out.  Rules that speak of an old value hold for changes only.
"""

from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.engine import ACCELERATOR_TOKENS, EngineSpec
from pdcluster_schema.ports import MAX_RANKS, WHOLE_PROMPT_SCHEDULERS
from pdcluster_schema.routing import PREFILL_PARTS
from pdcluster_schema.section import Cel
from pdcluster_schema.sections import COMPUTING, ROLES
from pdcluster_schema.values import is_label
from pdcluster_schema.vllm_engine import PDCLUSTER_ONLY, VLLM_ONLY
from pdcluster_schema.workload import MAX_WORKLOAD_NAME, REVISION_LENGTH, workload_name

_KNOWN = sorted(accelerators(), key=lambda name: (name.islower(), name))
_TYPES = f"{', '.join(_KNOWN[:-1])} and {_KNOWN[-1]}, or be defined in spec.accelerators"
_DEFAULTS = {str(field.alias): field.default for field in EngineSpec.model_fields.values()}


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


def spec_rules() -> Iterator[Cel]:
    """Rules of the spec."""
    yield from _accelerator_rules()
    yield from _pair_rules()
    yield from _rank_rules()
    for role in COMPUTING:
        yield from _engine_rules(role)
    yield from _one_role_rules()
    yield from _stock_engine_rules()
    yield from _autoscale_rules()
    yield from _mixed_rules()
    yield from _discovery_rules()


def _given(field: str, of: str = "role") -> str:
    """A field of the engine, of the role or else of the spec."""
    return f"{of}.?engine.?{field}.or(self.?engine.?{field})"


def _value(field: str, of: str = "role") -> str:
    default = _DEFAULTS[field]
    text = f"'{default}'" if isinstance(default, str) else str(default).lower()
    return f"{_given(field, of)}.orValue({text})"


def _size(field: str, role: str, on_accelerator: int) -> str:
    """A size that has another default on an accelerator."""
    on_cpu = f"{_value('device')} == 'cpu' || self.roles.{role}.pools.exists(p, p.gpu == 'cpu')"
    return f"{_given(field)}.orValue({on_cpu} ? {_DEFAULTS[field]} : {on_accelerator})"


def _each(text: str, joined: str = " && ") -> str:
    """A condition of each role that computes."""
    return joined.join(text.replace("ROLE", role) for role in COMPUTING)


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


def _pair_rules() -> Iterator[Cel]:
    """Both ends of a transfer hold the same model and dtype, which are given once, and the same
    kind of cache.
    """
    prefill, decode = "roles.prefill", "roles.decode"
    tensor = "tensorParallelSize"
    p, d = _value(tensor, prefill), _value(tensor, decode)
    for condition, message in (
        (
            f"{_value('blockSize', prefill)} == {_value('blockSize', decode)}",
            "KV blocks move between roles: give prefill and decode the same engine.blockSize",
        ),
        (
            f"{_value('batchInvariant', prefill)} == {_value('batchInvariant', decode)}",
            "a remote prefill gives the same bits as a local one: give prefill and decode the same "
            "engine.batchInvariant",
        ),
        (
            f"{p} % {d} == 0 || {d} % {p} == 0",
            "KV heads move between roles in whole slices: of engine.tensorParallelSize of prefill "
            "and decode let one divide the other",
        ),
    ):
        yield Cel(
            f"[self.roles].all(roles, !has({prefill}) || !has({decode}) || "
            f"!has({prefill}.engine) && !has({decode}.engine) || {condition})",
            message,
            ".roles",
        )


def _rank_rules() -> Iterator[Cel]:
    tensor, pipeline = "tensorParallelSize", "pipelineParallelSize"
    of_role = (
        f"(!has(roles.ROLE) || roles.ROLE.?engine.?{tensor}.orValue(tensor) * "
        f"roles.ROLE.?engine.?{pipeline}.orValue(pipeline) <= {MAX_RANKS})"
    )
    yield Cel(
        f"[self.?engine.?{tensor}.orValue(1)].all(tensor, "
        f"[self.?engine.?{pipeline}.orValue(1)].all(pipeline, "
        f"[self.roles].all(roles, {_each(of_role)})))",
        f"engine.{tensor} times engine.{pipeline} must be at most {MAX_RANKS}, the ranks of one "
        "worker: lower one of them",
        ".roles",
    )
    yield Cel(
        _each(
            "(!has(self.roles.ROLE) || self.roles.ROLE.pools.all(p, !has(p.gpusPerReplica) || "
            "(p.gpu == 'cpu' ? p.gpusPerReplica == 1 : p.gpusPerReplica >= "
            f"{_value(tensor, 'self.roles.ROLE')} * {_value(pipeline, 'self.roles.ROLE')})))"
        ),
        f"gpusPerReplica must be at least engine.{tensor} times engine.{pipeline}, on pools with "
        "an accelerator: raise it, or leave it out",
        ".roles",
    )


def _of_role(role: str, condition: str, message: str) -> Cel:
    return Cel(f"[?self.roles.?{role}].all(role, {condition})", message, f".roles.{role}")


def _engine_rules(role: str) -> Iterator[Cel]:
    """Fields of an engine that do not fit together, or not with the pools."""
    for condition, message in (*_scheduling(role), *_devices(role)):
        yield _of_role(role, condition, message)


def _scheduling(role: str) -> tuple[tuple[str, str], ...]:
    tokens = _size("maxBatchedTokens", role, ACCELERATOR_TOKENS)
    # requests fit by default into a step of any size on an accelerator
    sequences = _size("maxSequences", role, 1)
    scheduler, is_chunked = _value("scheduler"), _value("chunkedPrefill")
    whole = ", ".join(f"'{name}'" for name in WHOLE_PROMPT_SCHEDULERS)
    threshold, high = _value("longPrefillTokenThreshold"), _given("chunkSchedule.?high")
    return (
        (
            f"{tokens} >= {sequences} || self.?engine.?type.orValue('pdcluster') != 'pdcluster'",
            "engine.maxBatchedTokens must be at least engine.maxSequences, since a step computes a "
            "token of each sequence: raise the one or lower the other",
        ),
        (
            f"!{_given('tbtSloMilliseconds')}.hasValue() && !{high}.hasValue() || "
            f"{scheduler} == 'sarathi'",
            "engine.tbtSloMilliseconds and engine.chunkSchedule are for engine.scheduler: sarathi: "
            "leave them out, or set that",
        ),
        (
            f"{is_chunked} || {scheduler} == 'continuous'",
            "engine.chunkedPrefill: false is for engine.scheduler: continuous: leave it out",
        ),
        (
            f"{threshold} == 0 || {scheduler} == 'continuous' && {is_chunked}",
            "engine.longPrefillTokenThreshold caps the chunks of engine.scheduler: continuous, and "
            "no prompt is cut so here: leave it out",
        ),
        (
            f"!({scheduler} in [{whole}]) && {is_chunked} || "
            f"{tokens} >= {_given('maxModelLen')}.orValue(1)",
            "engine.maxBatchedTokens must be at least engine.maxModelLen, since a step computes a "
            "whole prompt: raise the one or lower the other",
        ),
        (
            f"[{threshold}].all(tokens, tokens == 0 || "
            f"tokens <= {_given('maxModelLen')}.orValue(tokens))",
            "engine.longPrefillTokenThreshold must be at most engine.maxModelLen: lower it or "
            "leave it out",
        ),
        (
            f"{high}.optMap(tokens, tokens <= {tokens}).orValue(true)",
            "engine.chunkSchedule.high must be at most engine.maxBatchedTokens: lower the one or "
            "raise the other",
        ),
    )


def _devices(role: str) -> tuple[tuple[str, str], ...]:
    is_cpu = f"{_value('device')} == 'cpu'"
    pools = f"self.roles.{role}.pools"
    return (
        (
            f"!{_value('batchInvariant')} || {is_cpu} || {pools}.all(p, p.gpu == 'cpu')",
            "engine.batchInvariant is for CPUs so far, and gpu of a pool is not cpu: leave it out, "
            "or set engine.device: cpu",
        ),
        (
            f"{_value('device')} != 'cuda' || {pools}.all(p, p.gpu != 'cpu')",
            "engine.device: cuda needs an accelerator, and gpu of a pool is cpu: give the pool "
            "another gpu, or leave engine.device out",
        ),
        (
            f"{_given('numBlocks')}.optMap(blocks, blocks >= {_value('dataParallelSize')})"
            ".orValue(true)",
            "engine.numBlocks must be at least engine.dataParallelSize, whose engines share them: "
            "raise the one or lower the other",
        ),
    )


def _one_role_rules() -> Iterator[Cel]:
    """Sections that are of use to one role, or with another section, alone."""
    delayer = "prefillDelayer.optMap(delayer, delayer.?enabled.orValue(true))"
    yield _of_role(
        "decode",
        f"!{_given(delayer)}.orValue(false)",
        "engine.prefillDelayer is for prefill and mixed workers: set it in roles.prefill.engine, "
        "or enabled: false for decode",
    )
    method = "speculation.optMap(speculation, speculation.?method.orValue('ngram'))"
    yield _of_role(
        "prefill",
        f"{_given(method)}.orValue('Off') == 'Off'",
        "engine.speculation is for decode and mixed workers: set it in roles.decode.engine, or "
        "method: Off for prefill",
    )
    yield Cel(
        "!(self.?routing.?relaying.?enabled.orValue(false)) || has(self.roles.router)",
        "relaying is for routers, and there are none: give roles.router, or leave "
        "routing.relaying out",
        ".routing",
    )
    yield Cel(
        "size(self.?qos.?tenants.orValue({})) == 0 || self.?service.?apiKeySecret.hasValue()",
        "qos.tenants is for API keys, and no key is asked for: give service.apiKeySecret, or leave "
        "qos.tenants out",
        ".qos",
    )
    policy = _value("schedulingPolicy", "self.roles.ROLE")
    yield Cel(
        "!self.?qos.?allowClientPriority.orValue(false) || "
        + _each(f"has(self.roles.ROLE) && {policy} != 'fcfs'", " || "),
        "no engine goes by priorities, since engine.schedulingPolicy is fcfs: leave "
        "qos.allowClientPriority out, or set schedulingPolicy: priority",
        ".qos",
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
        for fields in (PDCLUSTER_ONLY, VLLM_ONLY)
    )
    for engine, path, type_of in sections:
        yield Cel(
            f"[?{engine}].all(engine, {type_of} == 'pdcluster' || !({ours}))",
            f"engine.type: vllm has none of {', '.join(PDCLUSTER_ONLY)}: leave them out, or give "
            "vLLM's own flags in engine.args, and more replicas in place of dataParallelSize",
            path,
        )
        yield Cel(
            f"[?{engine}].all(engine, !({stock}) || {type_of} != 'pdcluster')",
            f"engine.{', '.join(VLLM_ONLY[:-1])} and {VLLM_ONLY[-1]} are for a stock engine: leave "
            "them out, or set engine.type: vllm",
            path,
        )
    image = "(!has(self.roles.ROLE) || self.roles.ROLE.?engine.?image.hasValue())"
    yield Cel(
        f"self.?{kind} == 'pdcluster' || self.?engine.?image.hasValue() || {_each(image)}",
        "image is missing, and engine.type: vllm needs it on Kubernetes: give a stock image, like "
        "vllm/vllm-openai:v0.32.0",
        ".engine",
    )


def _autoscale_rules() -> Iterator[Cel]:
    """A schedule or a limit that speaks of nothing would look as if it held."""
    pool = (
        "(s.role == 'ROLE' && has(self.roles.ROLE) && "
        "self.roles.ROLE.pools.exists(p, p.name == s.pool))"
    )
    yield Cel(
        "!has(self.autoscale) || !has(self.autoscale.schedules) || "
        f"self.autoscale.schedules.all(s, {_each(pool, ' || ')})",
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
    yield Cel(
        "!has(self.autoscale) || self.autoscale.mode != 'On' || (has(self.autoscale.budget) && "
        f"has(self.autoscale.budget.total)) || ({_each(limited)})",
        "On needs a ceiling: give maxReplicas to every pool, or set autoscale.budget.total",
        ".autoscale.mode",
    )


def _mixed_rules() -> Iterator[Cel]:
    unrouted = "mixed workers prefill what they decode, and no prefill is routed: remove it"
    parts = [(f"routing.{to_camel(name)}", unrouted) for name in PREFILL_PARTS]
    for path, message in (
        *parts,
        ("placement.minTransferGBps", "mixed workers move no KV between pools: remove it"),
        (
            "autoscale.prefill",
            "there is no prefill beside mixed workers: remove it, they go by the thresholds of "
            "autoscale.decode",
        ),
        (
            "autoscale.ratio",
            "mixed workers are one role, which has no ratio to another: remove it",
        ),
    ):
        section = path.partition(".")[0]
        yield Cel(
            f"!has(self.roles.mixed) || !has(self.{section}) || !has(self.{path})",
            message,
            f".{path}",
        )


def _discovery_rules() -> Iterator[Cel]:
    endpoints = "(size({}.?discovery.?etcd.?endpoints.orValue([])) > 0)"
    yield Cel(
        f"{endpoints.format('self')} == {endpoints.format('oldSelf')}",
        "an etcd of your own (discovery.etcd.endpoints) and one that is run for the cluster cannot "
        "be exchanged for each other: make a new PDCluster",
        ".discovery",
    )
    replicas = "{}.?discovery.?etcd.?replicas.orValue(1)"
    yield Cel(
        f"{replicas.format('self')} == {replicas.format('oldSelf')}",
        "discovery.etcd.replicas cannot change: make a new PDCluster",
        ".discovery",
    )
    storage = "has({0}.discovery) && has({0}.discovery.etcd) && has({0}.discovery.etcd.storage)"
    now, before = "self.discovery.etcd.storage", "oldSelf.discovery.etcd.storage"
    yield Cel(
        f"!({storage.format('self')}) ? !({storage.format('oldSelf')}) : "
        f"{storage.format('oldSelf')} && {now}.size == {before}.size && "
        f"(has({now}.className) ? {now}.className : '') == "
        f"(has({before}.className) ? {before}.className : '') && {now}.retain == {before}.retain",
        "discovery.etcd.storage cannot change: make a new PDCluster",
        ".discovery",
    )
