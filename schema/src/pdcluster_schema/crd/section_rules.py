"""Rules of single sections, as the API server checks them."""

from pdcluster_schema.autoscale import (
    DecodeScalingSpec,
    PrefillScalingSpec,
    RatioSpec,
    ScheduleSpec,
)
from pdcluster_schema.crd.keywords import Cel
from pdcluster_schema.discovery import EtcdSpec
from pdcluster_schema.engine import SpeculationSpec
from pdcluster_schema.model import ModelSpec
from pdcluster_schema.placement import PlacementSpec
from pdcluster_schema.qos import EstimationSpec
from pdcluster_schema.resources import ResourcesSpec
from pdcluster_schema.routing import PrefillQueueSpec, SloFeedbackSpec
from pdcluster_schema.scheduling import ChunkScheduleSpec
from pdcluster_schema.sections import MAX_POOLS, ROUTER, AcceleratorSpec, PoolSpec, RolesSpec
from pdcluster_schema.service import CorsSpec
from pdcluster_schema.values import MAX_WORKERS

COMPUTING = ("prefill", "decode", "mixed")
ROLES = (*COMPUTING, ROUTER)


def is_label(value: str, path: str) -> Cel:
    """A name is a DNS-1123 label that starts with a letter."""
    return Cel(
        f"{value}.matches('^[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?$')",
        "use at most 63 lower-case letters, digits and '-', starting with a letter and ending "
        "with a letter or digit",
        path,
    )


def _ascend(low: str, high: str) -> Cel:
    return Cel(
        f"!has(self.{low}) || !has(self.{high}) || self.{low} <= self.{high}",
        f"{low} must be at most {high}: lower {low} or raise {high}",
        f".{low}",
    )


def _down(low: str, high: str) -> Cel:
    return Cel(
        f"self.{low} < self.{high}",
        f"{low} must be less than {high}: lower it, or raise the scale-up threshold",
        f".{low}",
    )


def _sum(number: str, most: int) -> str:
    parts = [f"(has(self.{role}) ? {number.format(role=role)} : 0)" for role in ROLES]
    return f"{' + '.join(parts)} <= {most}"


SECTION_RULES: dict[type, tuple[Cel, ...]] = {
    ModelSpec: (
        Cel(
            "has(self.path) != has(self.huggingFace)",
            "give either path or huggingFace, the one that the model comes from",
        ),
        Cel(
            "has(self.path) || !has(self.pvc)",
            "a volume needs the model's path in it: give path, or leave pvc out",
            ".pvc",
        ),
        Cel(
            "!has(self.path) || has(self.pvc) || self.path.startsWith('/')",
            "path must begin with /, since ~ and relative paths without pvc are for pdctl "
            "alone: write the folder in the image like /models/llm, or give pvc and the "
            "folder's path on it",
            ".path",
        ),
        Cel(
            "!has(self.nodeCache) || has(self.huggingFace)",
            "nodeCache keeps downloads, and nothing is downloaded: give huggingFace, or leave "
            "nodeCache out",
            ".nodeCache",
        ),
    ),
    RolesSpec: (
        *(
            Cel(
                f"!self.?{role}.?engine.?type.hasValue()",
                "engine.type is of the whole cluster, since KV moves between engines of one type: "
                "set it in spec.engine",
                f".{role}",
            )
            for role in COMPUTING
        ),
        Cel(
            "has(self.mixed) ? !has(self.prefill) && !has(self.decode) : has(self.prefill) && "
            "has(self.decode)",
            "roles must be exactly {prefill, decode} or {mixed}: add the missing role or "
            "remove the others",
        ),
        Cel(
            _sum("self.{role}.pools.map(p, p.replicas).sum()", MAX_WORKERS),
            f"replicas of all pools must be at most {MAX_WORKERS} together: lower some, or make "
            "another PDCluster",
        ),
        Cel(
            _sum("size(self.{role}.pools)", MAX_POOLS),
            f"pools of all roles must be at most {MAX_POOLS} together: join some, or make another "
            "PDCluster",
        ),
        Cel(
            "!has(self.router) || !has(self.router.engine)",
            "routers have no engine: remove it",
            ".router.engine",
        ),
        Cel(
            "!has(self.router) || self.router.pools.all(p, p.gpu == 'cpu')",
            "a router computes nothing: leave gpu out",
            ".router.pools",
        ),
    ),
    PoolSpec: (
        _ascend("minReplicas", "maxReplicas"),
        Cel(
            "!has(self.minReplicas) || self.replicas >= self.minReplicas",
            "replicas must be at least minReplicas: raise replicas or lower minReplicas",
            ".replicas",
        ),
        Cel(
            "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            "replicas must be at most maxReplicas: lower replicas or raise maxReplicas",
            ".replicas",
        ),
        is_label("self.name", ".name"),
        Cel(
            "self.gpu == oldSelf.gpu",
            "gpu of a pool cannot change: add a pool under another name, and remove this one",
            ".gpu",
        ),
        Cel(
            "self.gpu == 'cpu' || self.?gpusPerReplica.orValue(0) == "
            "oldSelf.?gpusPerReplica.orValue(0)",
            "gpusPerReplica of a pool cannot change: add a pool under another name, and remove "
            "this one",
            ".gpusPerReplica",
        ),
    ),
    ChunkScheduleSpec: (
        Cel(
            "self.low <= self.high",
            "low must be at most high: lower low or raise high",
            ".low",
        ),
    ),
    SpeculationSpec: (
        Cel(
            "self.?promptLookupMin.orValue(3) <= self.?promptLookupMax.orValue(5)",
            "promptLookupMin must be at most promptLookupMax: lower the one or raise the other",
        ),
        Cel(
            "self.?method.orValue('ngram') == 'Off' || (self.?method.orValue('ngram') == "
            "'draft') == has(self.draftModel)",
            "method: draft needs draftModel, the folder of a smaller model, and no other "
            "method has one",
        ),
    ),
    ResourcesSpec: (
        Cel(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in "
            "self.limits) || !isQuantity(string(self.requests[name])) || "
            "!isQuantity(string(self.limits[name])) || "
            "!quantity(string(self.requests[name])).isGreaterThan(quantity(string(self.limits[name]))))",
            "each request must be at most the limit of the same resource: lower the request or "
            "raise the limit",
            ".requests",
        ),
    ),
    AcceleratorSpec: (
        Cel(
            "(has(self.resource) ? self.resource : '') == (has(oldSelf.resource) ? "
            "oldSelf.resource : '') && (has(self.nodeLabels) && size(self.nodeLabels) > 0 ? "
            "has(oldSelf.nodeLabels) && self.nodeLabels == oldSelf.nodeLabels : "
            "!has(oldSelf.nodeLabels) || size(oldSelf.nodeLabels) == 0)",
            "the definition of an accelerator cannot change: add a type under another name, "
            "and pools of it",
        ),
    ),
    SloFeedbackSpec: (_ascend("minThreshold", "maxThreshold"),),
    PrefillQueueSpec: (
        Cel(
            "(has(self.minWindowMilliseconds) ? self.minWindowMilliseconds : 2.0) <= "
            "(has(self.maxWindowMilliseconds) ? self.maxWindowMilliseconds : 10.0)",
            "minWindowMilliseconds must be at most maxWindowMilliseconds: lower "
            "minWindowMilliseconds or raise maxWindowMilliseconds",
            ".minWindowMilliseconds",
        ),
        Cel(
            "(has(self.minPrompts) ? self.minPrompts : 8) <= (has(self.maxPrompts) ? "
            "self.maxPrompts : 32)",
            "minPrompts must be at most maxPrompts: lower minPrompts or raise maxPrompts",
            ".minPrompts",
        ),
        Cel(
            "!has(self.lengthBuckets) || self.lengthBuckets.all(x, "
            "self.lengthBuckets.exists_one(y, y == x)) && self.lengthBuckets.isSorted()",
            "lengthBuckets must ascend, each once: sort them",
            ".lengthBuckets",
        ),
        Cel(
            "!has(self.latencyClasses) || self.latencyClasses.all(x, "
            "self.latencyClasses.exists_one(y, y.priority == x.priority)) && "
            "self.latencyClasses.map(x, x.priority).isSorted()",
            "latencyClasses must ascend by priority, each once: sort them",
            ".latencyClasses",
        ),
    ),
    EstimationSpec: (
        Cel(
            "!(has(self.rejectUnmeetable) && self.rejectUnmeetable) || has(self.estimator) && "
            "self.estimator != 'ema'",
            "needs an estimate of the completion, and estimator ema has none: set estimator to "
            "rwt or loadAware, or leave it out",
            ".rejectUnmeetable",
        ),
    ),
    EtcdSpec: (
        Cel(
            "!has(self.tlsSecret) || size(self.?endpoints.orValue([])) > 0",
            "tlsSecret is for endpoints, and none are given: give endpoints, or leave "
            "tlsSecret out",
            ".tlsSecret",
        ),
        Cel(
            "!has(self.storage) || size(self.?endpoints.orValue([])) == 0",
            "storage is for an etcd that is run here, and endpoints are given: leave storage "
            "or endpoints out",
            ".storage",
        ),
        Cel(
            "self.?replicas.orValue(1) == 1 || has(self.storage) || "
            "size(self.?endpoints.orValue([])) > 0",
            "3 members need storage: one that lost its data could not come back: give storage, "
            "or replicas: 1",
            ".storage",
        ),
    ),
    CorsSpec: (
        Cel(
            "!has(self.allowCredentials) || !self.allowCredentials || "
            "!has(self.allowedOrigins) || !('*' in self.allowedOrigins)",
            "is not for every origin: name them in allowedOrigins in place of *, or leave it out",
            ".allowCredentials",
        ),
    ),
    PlacementSpec: (
        Cel(
            "has(self.domainLabel) || has(self.minTransferGBps)",
            "says nothing: give domainLabel, minTransferGBps or both, or remove it",
        ),
    ),
    PrefillScalingSpec: (
        _down("queueDown", "queueUp"),
        _down("utilizationDown", "utilizationUp"),
    ),
    DecodeScalingSpec: (
        _down("queueDown", "queueUp"),
        _down("kvUsageDown", "kvUsageUp"),
    ),
    RatioSpec: (_ascend("min", "max"),),
    ScheduleSpec: (
        Cel(
            "has(self.minReplicas) || has(self.maxReplicas)",
            "the schedule changes nothing: give minReplicas, maxReplicas or both",
        ),
        _ascend("minReplicas", "maxReplicas"),
        is_label("self.name", ".name"),
    ),
}
