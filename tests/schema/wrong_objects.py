"""PDCluster objects that are wrong: one table for the model (tests/operator) and for the API server
(tests/apiserver).
"""

from dataclasses import dataclass

from tests.schema.object_cases import (
    CPU,
    HUB,
    NIGHT,
    POOL,
    SLEEPS,
    Change,
    at,
    both,
    vllm,
    without,
)
from tests.schema.wrong_flexible import WRONG_FLEXIBLE
from tests.schema.wrong_numbers import WRONG_NUMBERS
from tests.schema.wrong_scheduling import WRONG_SCHEDULING
from tests.schema.wrong_stock_engines import WRONG_STOCK_ENGINES


@dataclass(frozen=True)
class InvalidObject:
    """A change after which the object is refused.

    fault: how the one fault of the model begins
    field: what the API server names; None = the API server never sees it, or drops it without a
           word
    """

    change: Change
    fault: str
    field: str | None


_SAME = "where the fault is"

HOST_TIER = {"type": "host", "size": 1}


def wrong(
    path: str, value: object, message: str, *, fault_at: str = "", field: str | None = _SAME
) -> InvalidObject:
    """An object with a value at a path, and how the fault there, or `fault_at`, begins."""
    place = fault_at or path
    return InvalidObject(at(path, value), f"{place}: {message}", place if field == _SAME else field)


def nested(levels: int) -> object:
    """So many maps within each other."""
    value: object = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


BAD = [
    wrong(
        "apiVersion",
        "pdcluster.io/v2",
        "must be 'pdcluster.io/v1alpha1', not 'pdcluster.io/v2'; change it to that",
        field=None,
    ),
    InvalidObject(without("metadata.name"), "metadata.name: is required; add it", "metadata.name"),
    wrong(
        "metadata.name",
        "My_Chat",
        "'My_Chat' is not a name that Kubernetes takes; use at most 63 lower-case letters",
    ),
    InvalidObject(
        at("metadata.name", "c" * 32),
        "metadata.name: "
        + "c" * 32
        + "-prefill-cpu with a revision is 53 characters; a workload's name holds 52; shorten",
        "metadata.name",
    ),
    wrong(
        "metadata.namespace", "-a", "'-a' is not a namespace; use at most 63 lower-case", field=None
    ),
    InvalidObject(without("spec.model"), "spec.model: is required; add it", "spec.model"),
    wrong("spec.model.path", "", "must not be empty text, not ''; write its name or path"),
    wrong(
        "spec.model.dtype",
        "float16",
        "must be 'auto', 'float32' or 'bfloat16', not 'float16'; change it to that",
    ),
    wrong(
        "spec.model.toolParser",
        "gpt",
        "must be 'auto', 'none', 'hermes', 'llama3_json', 'mistral', 'pythonic', 'qwen' or "
        "'qwen3_coder', not 'gpt'",
    ),
    wrong("spec.model.chatTemplate", "", "must not be empty text, not ''"),
    InvalidObject(
        at("spec.model.chatTemplate", "x" * 65_537),
        "spec.model.chatTemplate:",
        "spec.model.chatTemplate",
    ),
    wrong(
        "spec.model.chatTemplate",
        "chatml-tool",
        "'chatml-tool' is neither chatml-tools nor Jinja text that names messages; did you "
        "mean chatml-tools?",
    ),
    *(
        InvalidObject(
            at("spec.model.chatTemplate", template),
            f"spec.model.chatTemplate: '{template}' is neither chatml-tools nor Jinja text",
            "spec.model.chatTemplate",
        )
        for template in ("You answer messages.", "{{ prompt }}", "{% if tools %}{% endif %}")
    ),
    InvalidObject(
        without("spec.model.path"),
        "spec.model: needs either path or huggingFace, and not both; give the one that the model "
        "comes from",
        "spec.model",
    ),
    wrong(
        "spec.model.huggingFace",
        HUB["huggingFace"],
        "needs either path or huggingFace, and not both",
        fault_at="spec.model",
    ),
    wrong(
        "spec.model",
        {**HUB, "pvc": {"claimName": "models"}},
        "needs the model's path in it; give path, or leave pvc out",
        fault_at="spec.model.pvc",
    ),
    wrong("spec.model.pvc", {}, "is required; add it", fault_at="spec.model.pvc.claimName"),
    wrong(
        "spec.model.nodeCache",
        "/cache",
        "keeps downloads, and nothing is downloaded; give huggingFace, or leave nodeCache out",
    ),
    wrong(
        "spec.model",
        {**HUB, "nodeCache": "cache"},
        "'cache' is not an absolute path; write it like /var/cache/models",
        fault_at="spec.model.nodeCache",
    ),
    wrong(
        "spec.model",
        {"name": "tiny", "huggingFace": {"repo": "https://hub.example/a/b"}},
        "'https://hub.example/a/b' is not a repository; write it like HuggingFaceTB/",
        fault_at="spec.model.huggingFace.repo",
    ),
    wrong(
        "spec.model",
        {"name": "tiny", "huggingFace": {"repo": "a/b", "revision": "../main"}},
        "'../main' is not a branch, tag or commit; write one without spaces, '..' and any of",
        fault_at="spec.model.huggingFace.revision",
        field=None,
    ),
    wrong(
        "spec.model",
        {"name": "tiny", "huggingFace": {"repo": "a/b", "tokenSecret": "My_Token"}},
        "'My_Token' is not a name that Kubernetes takes; use lower-case letters",
        fault_at="spec.model.huggingFace.tokenSecret",
    ),
    wrong(
        "spec.image.pullSecrets",
        ["a" * 254],
        "must have at most 253 characters, not 'aaaaa",
        fault_at="spec.image.pullSecrets[0]",
    ),
    wrong(
        "spec.roles.router",
        {"pools": [CPU], "engine": {"blockSize": 16}},
        "is not for routers, which have no engine; remove it",
        fault_at="spec.roles.router.engine",
    ),
    wrong(
        "spec.roles.router",
        {"pools": [CPU, {**CPU, "name": "big", "gpu": "H100"}]},
        "must have gpu: cpu, since a router computes nothing, not H100; leave gpu out",
        fault_at="spec.roles.router.pools[1]",
        field="spec.roles.router.pools",
    ),
    wrong(
        "spec.routing.relaying",
        {"enabled": True},
        "is for routers, and there are none; give roles.router, or leave routing.relaying out",
    ),
    InvalidObject(
        without("spec.roles.decode"),
        "spec.roles: must be exactly prefill and decode, or mixed, not prefill; add the missing "
        "role or remove the others; router and picker go with either",
        "spec.roles",
    ),
    wrong(
        "spec.roles",
        {"router": {"pools": [CPU]}},
        "must be exactly prefill and decode, or mixed, not router; add the missing role or remove ",
    ),
    wrong(
        "spec.roles.mixed",
        {"pools": [CPU]},
        "must be exactly prefill and decode, or mixed, not decode and ",
        fault_at="spec.roles",
    ),
    wrong("spec.roles.decode.pools", [], "must hold 1 to 16 pools, not 0; add or remove pools"),
    wrong(
        "spec.roles.decode.pools",
        [{"name": f"p{number}", "replicas": 0} for number in range(17)],
        "must hold 1 to 16 pools, not 17; add or remove pools",
    ),
    wrong(
        "spec.roles.decode.pools", {}, "must be a list, not {}; write its entries as `- ...` lines"
    ),
    wrong(
        "spec.roles.decode.pools",
        [CPU, CPU],
        "'cpu' names two pools of this role; give each pool its own name",
        fault_at="spec.roles.decode.pools[1].name",
        field="spec.roles.decode.pools[1]",
    ),
    InvalidObject(
        at(f"{POOL}.name", "Cpu"),
        "spec.roles.decode.pools[0].name: 'Cpu' is not a name that Kubernetes takes",
        "spec.roles.decode.pools[0].name",
    ),
    InvalidObject(
        at(f"{POOL}.gpu", "V100"),
        "spec.roles.decode.pools[0].gpu: 'V100' is not a known accelerator; use one of A10, "
        "A100-40GB, A100-80GB, B200, B300, GAUDI3, GB200, GB300, H100, H20, H200, L4, L40S, "
        "MI300X, MI355X, RTX-PRO-6000, RUBIN-CPX, T4, cpu",
        "spec.roles.decode.pools",
    ),
    *(
        InvalidObject(
            at(f"{POOL}.gpu", gpu),
            f"spec.roles.decode.pools[0].gpu: is {gpu}, and engine.type pdcluster computes on "
            "NVIDIA GPUs and CPUs; set engine.type: vllm with an image for it, or engine.device: "
            "cpu",
            None,
        )
        for gpu in ("MI300X", "GAUDI3")
    ),
    wrong(
        "spec.roles.decode.engine",
        {"device": "cuda"},
        "is cuda, which needs an accelerator as gpu of each pool, not cpu in pools[0]; give the "
        "pool another gpu, or leave engine.device out",
        fault_at="spec.roles.decode.engine.device",
    ),
    wrong(
        "spec.accelerators",
        {f"gpu{number}": {} for number in range(65)},
        "must have at most 64 entries, not {",
    ),
    wrong(
        "spec.accelerators",
        {"X": {"memoryBytes": 288}},
        "must be at least 1000000000, not 288; raise it",
        fault_at="spec.accelerators.X.memoryBytes",
    ),
    *(
        wrong(
            "spec.accelerators",
            {"X": {field: value}},
            message,
            fault_at=f"spec.accelerators.X.{field}",
        )
        for field, value, message in (
            ("linkBytes", 900, "must be at least 1000000000, not 900; raise it"),
            ("networkBytes", 400, "must be at least 1000000000, not 400; raise it"),
            ("pricePerHour", 0, "must be more than 0, not 0; raise it"),
            ("pricePerHour", -2.5, "must be more than 0, not -2.5; raise it"),
        )
    ),
    wrong(
        "spec.accelerators",
        {"X": {"resource": "x" * 318}},
        "must have at most 317 characters, not ",
        fault_at="spec.accelerators.X.resource",
    ),
    wrong(
        "spec.accelerators",
        {"X": {"resorce": "x"}},
        "unknown field; did you mean resource?",
        fault_at="spec.accelerators.X.resorce",
    ),
    *(
        InvalidObject(change, f"{path}: must be at most 1024, not 1025; lower it", path)
        for path, change in (
            ("spec.roles.decode.pools[0].replicas", at(f"{POOL}.replicas", 1025)),
            ("spec.roles.decode.pools[0].minReplicas", at(f"{POOL}.minReplicas", 1025)),
            ("spec.roles.decode.pools[0].maxReplicas", at(f"{POOL}.maxReplicas", 1025)),
            (
                "spec.autoscale.schedules[0].minReplicas",
                at("spec.autoscale.schedules", [{**NIGHT, "minReplicas": 1025}]),
            ),
            (
                "spec.autoscale.schedules[0].maxReplicas",
                at("spec.autoscale.schedules", [{**NIGHT, "maxReplicas": 1025}]),
            ),
        )
    ),
    wrong(
        "spec.roles.decode.pools",
        [{"name": f"p{number}", "replicas": 512} for number in range(8)],
        "replicas of all pools must be at most 4096 together, not 4097; lower some, or make "
        "another PDCluster",
        fault_at="spec.roles",
    ),
    wrong(
        "spec.roles.decode.pools",
        [{"name": f"p{number}", "replicas": 0} for number in range(16)],
        "pools of all roles must be at most 16 together, not 17; join some, or make another "
        "PDCluster",
        fault_at="spec.roles",
    ),
    *(
        # {"spec":{"hostname":""}} has 24 bytes
        InvalidObject(
            at(f"{place}podTemplate", {"spec": {"hostname": "a" * (32 * 1024 - 23)}}),
            f"{place}podTemplate: has 32769 bytes as JSON, and may have 32768 at most; take out",
            None,
        )
        for place in ("spec.", "spec.roles.prefill.")
    ),
    wrong(
        "spec.service.annotations",
        {"notes": "a" * 128 * 1024},
        "has 131267 bytes as JSON, and may have 131072 at most; shorten the longest",
        fault_at="spec",
        field=None,
    ),
    wrong(
        "spec.podTemplate",
        {"spec": nested(100)},
        "has more than 100 levels of maps and lists; no field of a pod",
        fault_at="spec.podTemplate.spec.a.a",
        field=None,
    ),
    InvalidObject(
        at(f"{POOL}.gpusPerNode", 1),
        "spec.roles.decode.pools[0].gpusPerNode: unknown field; ",
        "spec.roles.decode.pools[0].gpusPerNode",
    ),
    *(
        InvalidObject(
            at(path.replace("[0]", ".0"), 65), f"{path}: must be at most 64, not 65; lower it", path
        )
        for path in (
            "spec.roles.decode.pools[0].gpusPerReplica",
            "spec.engine.tensorParallelSize",
            "spec.engine.pipelineParallelSize",
        )
    ),
    wrong(
        "spec.engine",
        {"numBlocks": 4, "dataParallelSize": 5},
        "must be at least dataParallelSize (5), whose engines share them, not 4; raise numBlocks",
        fault_at="spec.roles.prefill.engine.numBlocks",
    ),
    InvalidObject(
        at(f"{POOL}.gpusPerReplica", 2),
        "spec.roles.decode.pools[0].gpusPerReplica: means nothing on a pool with gpu: cpu; leave "
        "it out",
        "spec.roles",
    ),
    InvalidObject(
        both(
            at(f"{POOL}.gpu", "H100"),
            at(f"{POOL}.gpusPerReplica", 3),
            at("spec.engine.tensorParallelSize", 4),
        ),
        "spec.roles.decode.pools[0].gpusPerReplica: must be at least 4, not 3: each rank has one "
        "(tensorParallelSize (4) times",
        "spec.roles",
    ),
    wrong(
        "spec.engine",
        {"tensorParallelSize": 4, "pipelineParallelSize": 4},
        "tensorParallelSize (4) times pipelineParallelSize (4) is 16 ranks, over the 8 of one pod",
        fault_at="spec.roles.prefill.engine.tensorParallelSize",
        field="spec.roles",
    ),
    InvalidObject(
        both(at(f"{POOL}.gpu", "H100"), at(f"{POOL}.gpusPerReplica", 9)),
        "spec.roles.decode.pools[0].gpusPerReplica: must be at most 8, 8 in each pod, not 9; lower",
        "spec.roles",
    ),
    InvalidObject(
        at(f"{POOL}.gpusPerPod", 4),
        "spec.roles.decode.pools[0].gpusPerPod: means nothing on a pool with gpu: cpu; leave it",
        "spec.roles.decode.pools[0].gpusPerPod",
    ),
    InvalidObject(
        at(f"{POOL}.podsPerReplica", 17),
        "spec.roles.decode.pools[0].podsPerReplica: must be at most 16, not 17; lower it",
        "spec.roles.decode.pools[0].podsPerReplica",
    ),
    InvalidObject(
        both(
            at("spec.engine", {"type": "vllm", "image": "vllm:1", "tensorParallelSize": 32}),
            at(f"{POOL}.gpu", "H100"),
            at(f"{POOL}.gpusPerPod", 1),
            at("spec.roles.prefill.engine", {"tensorParallelSize": 8}),
        ),
        "spec.roles.decode.pools[0].gpusPerPod: is 1, so the 32 ranks of a worker",
        None,
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"dataParallelSize": 9}),
        "spec.roles.decode.engine.dataParallelSize: must be at most 8, not 9, but for type vllm; "
        "lower it, and give the pool more replicas",
        "spec.roles",
    ),
    InvalidObject(
        both(
            at(f"{POOL}.podsPerReplica", 2),
            at("spec.roles.decode.engine", {"dataParallelSize": 4}),
        ),
        "spec.roles.decode.pools[0].podsPerReplica: is 2, and dataParallelSize 4: each pod of a "
        "worker has one of its engines; set engine.dataParallelSize: 2, or leave podsPerReplica",
        "spec.roles",
    ),
    InvalidObject(
        both(
            vllm(),
            at(f"{POOL}.podsPerReplica", 3),
            at("spec.engine.tensorParallelSize", 4),
        ),
        "spec.roles.decode.pools[0].podsPerReplica: 3 pods do not divide the 4 ranks of a worker "
        "(tensorParallelSize (4) times pipelineParallelSize (1)); give a number that does",
        "spec.roles",
    ),
    InvalidObject(
        both(
            vllm(),
            at(f"{POOL}.gpu", "GB200"),
            at(f"{POOL}.gpusPerPod", 4),
            at(f"{POOL}.podsPerReplica", 2),
            at("spec.engine.tensorParallelSize", 16),
        ),
        "spec.roles.prefill.engine.tensorParallelSize: tensorParallelSize (16) times "
        "pipelineParallelSize (1) is 16 ranks, over the 8 of one pod; lower one of them, or give "
        "pools more podsPerReplica",
        "spec.roles",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [{"name": "p", "replicas": 1}]}}),
            at("spec.roles.mixed.pools.0.podsPerReplica", 2),
            at("spec.engine.dataParallelSize", 2),
            at("spec.roles.mixed.pools.0.name", "p" * 20),
            at("metadata.name", "c" * 10),
        ),
        f"metadata.name: {'c' * 10}-mixed-{'p' * 20} with a revision is 46 characters; a "
        "workload's name of several pods holds 45; shorten the name of the cluster or of the pool "
        "by 1",
        "metadata.name",
    ),
    InvalidObject(
        at(
            "spec.roles.router",
            {"pools": [{"name": "r", "replicas": 1, "podsPerReplica": 2}]},
        ),
        "spec.roles.router.pools: must have podsPerReplica 1, since a router is one process, not 2;"
        " leave podsPerReplica out",
        "spec.roles.router.pools",
    ),
    InvalidObject(
        both(
            at("spec.roles.prefill.engine", {"tensorParallelSize": 2}),
            at("spec.roles.decode.engine", {"tensorParallelSize": 3}),
        ),
        "spec.roles.decode.engine.tensorParallelSize: must divide that of prefill or be a "
        "multiple of it, since KV heads move between roles in whole slices, not 3 for "
        "decode and 2 for prefill; correct tensorParallelSize of one of them",
        "spec.roles.decode.engine.tensorParallelSize",
    ),
    InvalidObject(
        at(f"{POOL}.replicas", -1),
        "spec.roles.decode.pools[0].replicas: must be at least 0, not -1; raise it",
        "spec.roles.decode.pools[0].replicas",
    ),
    InvalidObject(
        at(f"{POOL}.replicas", "1"),
        "spec.roles.decode.pools[0].replicas: must be a whole number, not '1'; write it without "
        "quotes or a fraction",
        "spec.roles.decode.pools[0].replicas",
    ),
    InvalidObject(
        at(f"{POOL}.replicas", True),
        "spec.roles.decode.pools[0].replicas: must be a whole number, not True",
        "spec.roles.decode.pools[0].replicas",
    ),
    InvalidObject(
        at(f"{POOL}.minReplicas", 2),
        "spec.roles.decode.pools[0].replicas: must be at least minReplicas (2), not 1; raise "
        "replicas or lower minReplicas",
        "spec.roles.decode.pools[0].replicas",
    ),
    InvalidObject(
        at(f"{POOL}.maxReplicas", 0),
        "spec.roles.decode.pools[0].replicas: must be at most maxReplicas (0), not 1; lower "
        "replicas or raise maxReplicas",
        "spec.roles.decode.pools[0].replicas",
    ),
    wrong(
        "spec.roles.decode.pools",
        [{"name": "cpu", "replicas": 2, "minReplicas": 3, "maxReplicas": 2}],
        "must be at most maxReplicas (2), not 3; lower minReplicas or raise maxReplicas",
        fault_at="spec.roles.decode.pools[0].minReplicas",
    ),
    InvalidObject(
        at(f"{POOL}.replica", 1),
        "spec.roles.decode.pools[0].replica: unknown field; did you mean replicas?",
        "spec.roles.decode.pools[0].replica",
    ),
    wrong(
        "spec.roles.decode.resources.limits",
        {"memory": "16GB"},
        "'16GB' is not an amount; write a whole number, or a quantity",
        fault_at="spec.roles.decode.resources.limits.memory",
        field="spec.roles.decode.resources.limits[memory]",
    ),
    wrong(
        "spec.roles.decode.resources",
        {"requests": {"cpu": 4}, "limits": {"cpu": "1500m"}},
        "must be at most the limit of cpu (1500m), not 4; lower the request or raise the limit",
        fault_at="spec.roles.decode.resources.requests.cpu",
        field="spec.roles.decode.resources.requests",
    ),
    *(
        InvalidObject(
            at("spec.roles.decode.resources", resources),
            f"spec.roles.decode.resources{fault}",
            None,
        )
        for resources, fault in (
            (
                {"limits": {"rdma/ib": "2500m"}},
                ".limits.rdma/ib: must be a whole number, and the request equal to the limit; give "
                "it in limits alone; the GPUs of a pool need no line",
            ),
            (
                {"limits": {"rdma/ib": 4}, "requests": {"rdma/ib": 2}},
                ".limits.rdma/ib: must be a whole number, and the request equal to the limit",
            ),
            (
                {"requests": {"hugepages-2Mi": "1Gi", "cpu": 1}},
                ".requests.hugepages-2Mi: must be a whole number, and the request equal",
            ),
            (
                {"limits": {"hugepages-2Mi": "1Gi"}},
                ".limits: hugepages-2Mi needs cpu or memory beside it; give memory too",
            ),
            ({"limits": {"rdma": 1}}, ": 'rdma' is no resource of a container; use cpu, memory"),
        )
    ),
    *(
        InvalidObject(
            both(
                at(f"{POOL}.gpu", "B200"),
                at("spec.roles.decode.resources", {field: {"nvidia.com/gpu": 8}}),
            ),
            f"spec.roles.decode.resources.{field}.nvidia.com/gpu: {fault}",
            None,
        )
        for field, fault in (
            (
                "limits",
                "is 8, and each pod of pool cpu has 1, by the ranks of its engine or "
                "gpusPerReplica; leave it out, and set those",
            ),
            ("requests", "must be a whole number, and the request equal to the limit"),
        )
    ),
    wrong(
        "spec.placement.domainLabel",
        "a rack",
        "'a rack' is not the key of a label; write it like topology.kubernetes.io/zone",
    ),
    wrong(
        "spec.roles.decode.resources.requests",
        {"cpu": 0.5},
        "0.5 is not an amount; write a whole number, or a quantity",
        fault_at="spec.roles.decode.resources.requests.cpu",
    ),
    wrong(
        "spec.podTemplate",
        {"template": {}},
        "'template' is no part of a pod template; use metadata and spec",
        fault_at="spec.podTemplate.template",
    ),
    *(
        wrong(
            "spec.podTemplate",
            {"spec": {field: [{"name": "proxy"}, {"name": name}]}},
            f"{name} is none of the {field} of a worker's pod; put it into {place}",
            fault_at=f"spec.podTemplate.spec.{field}[1]",
            field=None,
        )
        for field, name, place in (
            ("containers", "engine", "initContainers"),
            ("initContainers", "worker", "containers"),
        )
    ),
    wrong(
        "spec.podTemplate",
        {"spec": []},
        "must be a section of fields, not []; write `field: value` lines below it",
        fault_at="spec.podTemplate.spec",
    ),
    wrong("spec.podTemplate", [], "must be a section of fields, not []"),
    wrong(
        "spec.monitoring",
        {"labels": {"release": "prometheus"}},
        "has moved to the operator's chart; remove it, and set monitoring in the values of "
        "the chart",
    ),
    wrong("spec.hpa", {}, "unknown field; known here: model, roles, image, engine, accelerators"),
    wrong(
        "spec.autoscale.prefill",
        {"queueDown": 8},
        "must be less than queueUp (8), not 8; lower it, or raise the scale-up threshold",
        fault_at="spec.autoscale.prefill.queueDown",
    ),
    wrong(
        "spec.autoscale.decode",
        {"kvUsageUp": 0.2},
        "must be less than kvUsageUp (0.2), not 0.3; lower it, or raise the scale-up threshold",
        fault_at="spec.autoscale.decode.kvUsageDown",
    ),
    wrong(
        "spec.autoscale.objective.ttft",
        {"percentile": 0, "seconds": 1},
        "must be at least 1, not 0; raise it",
        fault_at="spec.autoscale.objective.ttft.percentile",
    ),
    wrong(
        "spec.autoscale.objective.itl",
        {"percentile": 100, "seconds": 1},
        "must be at most 99, not 100; lower it",
        fault_at="spec.autoscale.objective.itl.percentile",
    ),
    wrong(
        "spec.autoscale.objective.itl",
        {"percentile": 99.9, "seconds": 1},
        "must be a whole number, not 99.9",
        fault_at="spec.autoscale.objective.itl.percentile",
    ),
    wrong(
        "spec.autoscale.objective.ttft",
        {"percentile": 90, "seconds": 40.5},
        "must be at most 40 with a percentile, the last bound of the workers' buckets but one, "
        "not 40.5; lower it, or remove percentile, for the mean",
        fault_at="spec.autoscale.objective.ttft.seconds",
        field=None,
    ),
    wrong(
        "spec.autoscale.objective.queue",
        {"percentile": 90, "seconds": 0},
        "must be more than 0, not 0",
        fault_at="spec.autoscale.objective.queue.seconds",
    ),
    wrong(
        "spec.autoscale.objective.ttft",
        {"percentile": 90},
        "is required; add it",
        fault_at="spec.autoscale.objective.ttft.seconds",
    ),
    *(
        InvalidObject(
            both(
                at(f"spec.autoscale.{old}", 0.5),
                at(f"spec.autoscale.objective.{new}", {"seconds": 0.5}),
            ),
            f"spec.autoscale.{old}: says the same as objective.{new}; remove it: objective.{new} "
            "counts, without percentile for the mean",
            None,
        )
        for new, old in (("ttft", "prefill.ttftSeconds"), ("itl", "decode.tpotSeconds"))
    ),
    InvalidObject(
        both(vllm(), at("spec.autoscale.objective.queue", {"seconds": 1})),
        "spec.autoscale.objective.queue: is not measured with engine.type vllm, whose prefill "
        "workers do not say how long a request waited; set autoscale.objective.ttft in its place",
        None,
    ),
    wrong("spec.autoscale.decode.kvUsageUp", 75, "must be at most 1, not 75; lower it"),
    wrong(
        "spec.autoscale.ratio",
        {"min": 2, "max": 1},
        "must be at most max (1), not 2; lower min or raise max",
        fault_at="spec.autoscale.ratio.min",
    ),
    wrong(
        "spec.autoscale.budget",
        {"perGpu": {"V100": 1}},
        "'V100' is not a known accelerator; use one of A10, A100-40GB, A100-80GB, B200, B300, "
        "GAUDI3, GB200, GB300, H100, H20, H200, L4, L40S, MI300X, MI355X, RTX-PRO-6000, "
        "RUBIN-CPX, T4, cpu",
        fault_at="spec.autoscale.budget.perGpu.V100",
        field="spec.autoscale.budget.perGpu",
    ),
    wrong(
        "spec.autoscale.cost",
        {"cpu": 1, "V100": 0.5},
        "'V100' is not a known accelerator; use one of A10, A100-40GB,",
        fault_at="spec.autoscale.cost.V100",
        field="spec.autoscale.cost",
    ),
    wrong(
        "spec.autoscale.cost",
        {"cpu": 0},
        "must be more than 0, not 0; raise it",
        fault_at="spec.autoscale.cost.cpu",
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "pool": "b200"}],
        "'b200' is no pool of role decode; use one of cpu, or remove the schedule",
        fault_at="spec.autoscale.schedules[0].pool",
        field="spec.autoscale.schedules",
    ),
    wrong(
        "spec.autoscale.schedules",
        [NIGHT, {**NIGHT, "start": "23:00"}],
        "night is given twice; give each schedule a name of its own",
        fault_at="spec.autoscale.schedules[1].name",
        field="spec.autoscale.schedules",
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "maxReplicas": None}],
        "the schedule changes nothing; give minReplicas, maxReplicas or both",
        fault_at="spec.autoscale.schedules[0]",
    ),
    *(
        InvalidObject(
            at(f"spec.autoscale.{field}", limit + 1),
            f"spec.autoscale.{field}: must be at most {limit}, not {limit + 1}; lower it",
            f"spec.autoscale.{field}",
        )
        for field, limit in (
            ("intervalSeconds", 3600),
            ("staleAfter", 100),
            ("scaleUp.windowSeconds", 3600),
            ("scaleDown.windowSeconds", 3600),
        )
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.autoscale.prefill", {"queueUp": 9}),
        ),
        "spec.autoscale.prefill: means nothing beside mixed workers, which are one role; "
        "remove it, they go by the thresholds of autoscale.decode",
        "spec.autoscale.prefill",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}), at("spec.autoscale.ratio", {"min": 0.5})
        ),
        "spec.autoscale.ratio: means nothing beside mixed workers, which are one role; remove it",
        "spec.autoscale.ratio",
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "role": "mixed"}],
        "'mixed' is no role of this cluster; use one of prefill, decode, or remove the schedule",
        fault_at="spec.autoscale.schedules[0].role",
        field="spec.autoscale.schedules",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.routing.offload", {"prefillQueueMax": 9}),
        ),
        "spec.routing.offload: means nothing beside mixed workers, which prefill what "
        "they decode; remove it",
        "spec.routing.offload",
    ),
    InvalidObject(
        both(
            at("spec.roles.prefill.pools.0.maxReplicas", 4),
            at("spec.autoscale", {"mode": "On", "budget": {"perGpu": {"cpu": 8}}}),
        ),
        "spec.autoscale.mode: is On, which needs maxReplicas in each pool, not pool "
        "decode/cpu without it; give maxReplicas to every pool, or set "
        "autoscale.budget.total",
        "spec.autoscale.mode",
    ),
    InvalidObject(
        SLEEPS,
        "spec.autoscale.mode: is On and minReplicas of all pools is 0, which needs routers that "
        "hold requests while none runs, and no picker, which cannot; give roles.router without",
        "spec.autoscale.mode",
    ),
    InvalidObject(
        both(SLEEPS, at("spec.roles.router", {"pools": [CPU]}), at("spec.qos.admission", {})),
        "spec.qos.admission.workerWaitSeconds: is 0, so a request that finds all pools at zero, as "
        "autoscale.mode On with minReplicas 0 lets them be, would be refused; set it to the time",
        "spec.qos.admission.workerWaitSeconds",
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "start": "8:00"}],
        "'8:00' is not a time of day; write HH:MM, as in 08:30",
        fault_at="spec.autoscale.schedules[0].start",
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "timeZone": "Mars/Olympus"}],
        "'Mars/Olympus' is not a known time zone; use a name of the tz database",
        fault_at="spec.autoscale.schedules[0].timeZone",
        field=None,
    ),
    wrong(
        "spec.autoscale.schedules",
        [{**NIGHT, "minReplicas": 3, "maxReplicas": 2}],
        "must be at most maxReplicas (2), not 3; lower minReplicas or raise maxReplicas",
        fault_at="spec.autoscale.schedules[0].minReplicas",
    ),
    wrong(
        "spec.rollout.progressDeadlineSeconds",
        604801,
        "must be at most 604800, not 604801; lower it",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"blockSize": 32},
        "must be that of prefill, since KV blocks move between roles, not 32 for decode and 16 for "
        "prefill; correct blockSize of one of them",
        fault_at="spec.roles.decode.engine.blockSize",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"kvCacheDtype": "int8"},
        "must be that of prefill, since KV blocks move between roles, not int8 for decode and auto "
        "for prefill; correct kvCacheDtype of one of them",
        fault_at="spec.roles.decode.engine.kvCacheDtype",
    ),
    *(
        wrong(
            "spec.roles.decode.engine",
            {"quantization": "int8", **fields},
            "must be that of prefill, since decode goes on from KV that its weights compute, not "
            "int8 for decode and none for prefill; correct quantization of one of them, or set "
            "engine.allowMixedPrecision: true, without batchInvariant",
            fault_at="spec.roles.decode.engine.quantization",
        )
        for fields in ({}, {"allowMixedPrecision": True})
    ),
    wrong(
        "spec.engine.quantization",
        "fp8",
        "must be 'none', 'int8' or 'fp8_e4m3', not 'fp8'",
    ),
    wrong(
        "spec.engine.kvCacheDtype",
        "fp8",
        "must be 'auto', 'bf16', 'fp8_e4m3' or 'int8', not 'fp8'",
    ),
    InvalidObject(
        both(
            at("spec.engine.kvCacheDtype", "fp8_e4m3"), at("spec.roles.decode.pools.0.gpu", "A10")
        ),
        "spec.roles.decode.pools[0].gpu: is A10, without FP8, and engine.kvCacheDtype is fp8_e4m3; "
        "set engine.kvCacheDtype: int8 for all roles, or take a GPU with FP8",
        None,
    ),
    wrong(
        "spec.roles.prefill.engine",
        {"batchInvariant": True},
        "must be that of prefill, since a remote prefill gives the same bits as a local "
        "one, not false for decode and true for prefill; correct batchInvariant of one of them",
        fault_at="spec.roles.decode.engine.batchInvariant",
    ),
    InvalidObject(
        both(at("spec.engine.batchInvariant", True), at("spec.roles.decode.pools.0.gpu", "H100")),
        "spec.roles.decode.engine.batchInvariant: is for CPUs so far, and gpu of a pool is not "
        "cpu; leave it out, or set engine.device",
        "spec.roles.decode.engine.batchInvariant",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"maxSequences": 512},
        "must be at least maxSequences (512), since a step computes",
        fault_at="spec.roles.decode.engine.maxBatchedTokens",
    ),
    wrong(
        "spec.engine",
        {"prefillDelayer": {"maxDelayPasses": 3}},
        "is for prefill and mixed workers, and this holds for decode; set it in roles.prefill",
        fault_at="spec.roles.decode.engine.prefillDelayer",
    ),
    wrong(
        "spec.engine",
        {"speculation": {}},
        "is for decode and mixed workers, and this holds for prefill; set it in roles.decode",
        fault_at="spec.roles.prefill.engine.speculation",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"speculation": {"numTokens": 17}},
        "must be at most 16, not 17",
        fault_at="spec.roles.decode.engine.speculation.numTokens",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"speculation": {"method": "draft"}},
        "is for method: draft, which needs it; give the folder",
        fault_at="spec.roles.decode.engine.speculation.draftModel",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"speculation": {"draftModel": "/small"}},
        "is for method: draft, which needs it; give the folder",
        fault_at="spec.roles.decode.engine.speculation.draftModel",
    ),
    wrong(
        "spec.roles.decode.engine",
        {"speculation": {"promptLookupMin": 6}},
        "must be at most promptLookupMax (5), not 6; lower the one",
        fault_at="spec.roles.decode.engine.speculation.promptLookupMin",
    ),
    *(
        wrong("spec.engine", {"kvTiers": given}, message, fault_at=f"spec.engine.kvTiers{place}")
        for given, place, message in (
            (
                [{"type": "shared", "size": 1, "path": "/kv"}],
                "",
                "must be host, disk and shared in",
            ),
            (
                [
                    HOST_TIER,
                    *({"type": kind, "size": 1, "path": "/kv"} for kind in ("disk", "shared")),
                ],
                "",
                "must each have a folder of their own, since a disk tier is one worker's alone;",
            ),
            (
                [{"type": "host"}],
                "[0].size",
                "is the limit of a tier that the workers keep, and not of a url; give it without a",
            ),
            (
                [HOST_TIER, {"type": "shared", "url": "redis://kv", "size": 1}],
                "[1].size",
                "is the limit of a tier that the workers keep, and not of a url; give it without",
            ),
            (
                [HOST_TIER, {"type": "shared", "url": "redis://kv", "size": 1, "path": "/kv"}],
                "[1].url",
                "is for type: shared without a path; leave url or path out",
            ),
            (
                [{"type": "disk", "url": "redis://kv"}],
                "[0].url",
                "is for type: shared without a path; leave url or path out",
            ),
            (
                [HOST_TIER, {"type": "shared", "url": "redis://me:secret@kv"}],
                "[1].url",
                "'redis://...@kv' is no url of a Redis or Valkey server; write redis://HOST:PORT",
            ),
            (
                [HOST_TIER, {"type": "shared", "url": "http://kv:6379"}],
                "[1].url",
                "'http://kv:6379' is no url of a Redis or Valkey server; write redis://HOST:PORT",
            ),
            (
                [HOST_TIER, {"type": "shared", "url": "redis://kv:65536"}],
                "[1].url",
                "'redis://kv:65536' is no url of a Redis or Valkey server; write redis://HOST:PORT",
            ),
            (
                [HOST_TIER, {"type": "shared", "size": 1, "path": "/kv", "passwordSecret": "kv"}],
                "[1].passwordSecret",
                "is for a url; give the url, or leave it out",
            ),
            (
                [{"type": "host", "size": "64GB"}],
                "[0].size",
                "'64GB' is not an amount of memory; write bytes, or a number with Ki, Mi, Gi or Ti",
            ),
            (
                [{"type": "tape", "size": 1}],
                "[0].type",
                "must be 'host', 'disk' or 'shared', not 'tape'",
            ),
            (
                [{"type": "disk", "size": 1}],
                "[0].path",
                "is for types disk and shared, which need it; give the folder of a disk or a",
            ),
            (
                [{"type": "host", "size": 1}, {"type": "shared", "size": 1}],
                "[1].path",
                "is for types disk and shared, which need it; give the folder of a disk or a",
            ),
            (
                [{"type": "host", "size": 1, "path": "/kv"}],
                "[0].path",
                "is for types disk and shared, which need it; give the folder of a disk or a",
            ),
        )
    ),
    InvalidObject(
        at("spec.engine.kvTiers", [{"type": "disk", "size": 1, "path": "kv"}]),
        "spec.engine.kvTiers[0].path: 'kv' is no absolute path of a folder; write it like /mnt/kv,",
        "spec.engine.kvTiers[0].path",
    ),
    *(
        wrong(
            "spec.engine",
            {"kvTiers": [{"type": "disk", "size": 1, "path": path}]},
            f"'{path}' {reason}",
            fault_at="spec.engine.kvTiers[0].path",
        )
        for paths, reason in (
            (
                *(("/", "//", "/kv/../etc", "/kv/.", "/kv//1", "/kv/"),),
                "is no absolute path of a folder; write it like /mnt/kv, with letters, digits",
            ),
            (
                *(("/tmp", "/models", "/models/kv", "/etc", "/etc/pdcluster/tls", "/dev/shm"),),
                "is a folder that a worker's pod has for itself; give one of its own, like /mnt/kv",
            ),
        )
        for path in paths
    ),
    InvalidObject(
        at(
            "spec.engine.kvTiers",
            [{"type": "disk", "size": 1, "path": "/kv"}, {"type": "host", "size": 1}],
        ),
        "spec.engine.kvTiers: must be host, disk and shared in this order, each once at most",
        "spec.engine.kvTiers",
    ),
    wrong(
        "spec.engine",
        {"kvTiers": [{"type": "host", "size": 1}], "prefixCaching": False},
        "holds cached prefixes, and prefixCaching is false; leave one of them out",
        fault_at="spec.roles.prefill.engine.kvTiers",
    ),
    InvalidObject(
        both(
            at("spec.roles.decode.pools.0.gpu", "H100"),
            at(
                "spec.roles.decode.engine",
                {"kvTiers": [{"type": "host", "size": 1}], "tensorParallelSize": 2},
            ),
        ),
        "spec.roles.decode.engine.kvTiers: needs one rank on accelerators, each of which holds a",
        "spec.roles.decode.engine.kvTiers",
    ),
    InvalidObject(
        both(
            at("spec.roles.decode.engine.kvTiers", [{"type": "host", "size": "64Gi"}]),
            at("spec.roles.decode.resources.limits", {"memory": "64Gi"}),
        ),
        "spec.roles.decode.resources.limits.memory: must be more than the 68719476736 bytes of "
        "engine.kvTiers and the 1073741824 bytes of engine.kvCacheMemory, not 64Gi; raise it, or",
        None,
    ),
    InvalidObject(
        both(
            at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "4Gi"}),
            at("spec.roles.prefill.resources.requests", {"memory": "4Gi"}),
        ),
        "spec.roles.prefill.resources.requests.memory: must be more than the 4294967296 bytes of "
        "model.runtimeAdapters.memory and the 1073741824 bytes of engine.kvCacheMemory, not 4Gi;",
        None,
    ),
    InvalidObject(
        both(
            at("spec.roles.decode.pools.0.gpu", "H100"),
            at("spec.roles.decode.engine.kvTiers", [{"type": "host", "size": "33Gi"}]),
            at("spec.roles.decode.resources.limits", {"memory": "64Gi"}),
        ),
        "spec.roles.decode.resources.limits.memory: must be more than the 68719476736 bytes of "
        "engine.kvTiers, pinned, not 64Gi; raise it, or lower one of those",
        None,
    ),
    wrong(
        "spec.routing",
        {"racing": {"models": True}},
        "is for a race on one of service.models, which has none; name models there, or leave it",
        fault_at="spec.routing.racing.models",
    ),
    wrong(
        "spec.model",
        {"path": "/m", "name": "m", "runtimeAdapters": {"path": "../..", "memory": "1Gi"}},
        "'../..' is not a path without . and ..; write it without them, like /models/lora",
        fault_at="spec.model.runtimeAdapters.path",
    ),
    wrong("spec.engine", None, "is empty; give it a value or remove the key", field=None),
    wrong(
        "spec.engine",
        "big",
        "must be a section of fields, not 'big'; write `field: value` lines below it",
    ),
    wrong("spec.engine.maxSequences", 1.5, "must be a whole number, not 1.5"),
    wrong(
        "spec.engine.prefixCaching",
        "yes",
        "must be true or false, not 'yes'; write true or false without quotes",
    ),
    wrong(
        "spec.engine.kvCacheMemory",
        "512MB",
        "'512MB' is not an amount of memory; write bytes, or a number with Ki, Mi, Gi",
    ),
    wrong("spec.engine.deviceMemoryShare", 0, "must be more than 0, not 0; raise it"),
    *(InvalidObject(*case) for case in WRONG_NUMBERS),
    *(InvalidObject(*case) for case in (*WRONG_SCHEDULING, *WRONG_FLEXIBLE)),
    *(InvalidObject(*case) for case in WRONG_STOCK_ENGINES),
    *(
        InvalidObject(
            at("spec.routing.offload.policy", name),
            f"spec.routing.offload.policy: {name} was removed; use rule or measured",
            "spec.routing.offload.policy",
        )
        for name in ("islBounding", "prefillLoad", "islOrLoad")
    ),
    InvalidObject(
        at("spec.routing.offload.policy", 16**5000),
        "spec.routing.offload.policy: must be 'rule', 'measured', 'score' or 'sloFeedback', not a "
        "number of thousands of digits; change it to that",
        None,
    ),
    wrong(
        "spec.routing.offload.prefillLoad",
        {"busyBatches": 2},
        "was removed with the policies that it was for; remove it, and set policy to rule or "
        "measured",
    ),
    wrong(
        "spec.routing.offload.sloFeedback",
        {"minThreshold": 9, "maxThreshold": 8},
        "must be at most maxThreshold (8), not 9; lower minThreshold or raise maxThreshold",
        fault_at="spec.routing.offload.sloFeedback.minThreshold",
    ),
    *(
        InvalidObject(
            at("spec.routing.prefillQueue", content),
            f"spec.routing.prefillQueue.{message}",
            f"spec.routing.prefillQueue.{field}",
        )
        for content, field, message in (
            (
                {"minWindowMilliseconds": 11},
                "minWindowMilliseconds",
                "minWindowMilliseconds: must be at most maxWindowMilliseconds (10), not 11; "
                "lower minWindowMilliseconds or raise maxWindowMilliseconds",
            ),
            (
                {"minPrompts": 33},
                "minPrompts",
                "minPrompts: must be at most maxPrompts (32), not 33; lower minPrompts or raise "
                "maxPrompts",
            ),
            (
                {"lengthBuckets": [2, 1]},
                "lengthBuckets",
                "lengthBuckets: must ascend, each once; sort them",
            ),
            (
                {"latencyClasses": [{"priority": 1, "windowMilliseconds": 1}] * 2},
                "latencyClasses",
                "latencyClasses: must ascend by priority, each once; sort them",
            ),
        )
    ),
    wrong(
        "spec.routing.prefillScore.loadWeight",
        "1",
        "must be a number, not '1'; write it without quotes",
    ),
    wrong(
        "spec.routing.prefillScore.loadWeight",
        float("inf"),
        "must be a finite number, not inf; write one",
        field=None,
    ),
    wrong(
        "spec.service.cors",
        {"allowedOrigins": ["https://a.example/"]},
        "'https://a.example/' is not an origin; write it as a browser sends it, like https://chat.",
        fault_at="spec.service.cors.allowedOrigins[0]",
    ),
    wrong(
        "spec.service.cors",
        {"allowedHeaders": ["a b"]},
        "'a b' is not a header's name; write it like authorization",
        fault_at="spec.service.cors.allowedHeaders[0]",
    ),
    wrong(
        "spec.service.cors",
        {"allowedOrigins": ["*"], "allowCredentials": True},
        "is not for every origin; name them in allowedOrigins in place of *, or leave it out",
        fault_at="spec.service.cors.allowCredentials",
    ),
    *(
        wrong(
            "spec.service.models",
            [{"name": name, "cluster": "small"} for name in names],
            "must each have a name of their own, and not that of the model or an adapter of it; "
            "rename or remove one of them",
            field=field,
        )
        for names, field in (
            (("tiny",), "spec.service.models"),
            (("a", "a"), "spec.service.models[1]"),
        )
    ),
    wrong(
        "spec.service.models",
        [{"name": "a", "cluster": "chat"}],
        "'chat' is this PDCluster; name another one",
        fault_at="spec.service.models[0].cluster",
        field="spec.service.models",
    ),
    wrong(
        "spec.service.models",
        [{"name": "a" * 254, "cluster": "small"}],
        "must have at most 253",
        fault_at="spec.service.models[0].name",
    ),
    wrong(
        "spec.service.models",
        [{"name": "a", "cluster": "Chat"}],
        "'Chat' is not",
        fault_at="spec.service.models[0].cluster",
    ),
    wrong(
        "spec.qos.degradation.smallerModel",
        {"name": "tiny"},
        "is the model itself; name a smaller one, or leave smallerModel out",
        fault_at="spec.qos.degradation.smallerModel.name",
    ),
    InvalidObject(
        both(
            at("spec.service.models", [{"name": "a", "cluster": "b"}]),
            at("spec.qos.degradation.smallerModel", {"name": "a", "url": "http://a"}),
        ),
        "spec.qos.degradation.smallerModel.url: is for a model that is served elsewhere, and "
        "service.models has it; leave url out, or the model out of service.models",
        "spec.qos.degradation.smallerModel.url",
    ),
    wrong(
        "spec.qos.tenants",
        {"alice": {"priority": "low"}},
        "is for API keys, and no key is asked for; give service.apiKeySecret, or leave "
        "qos.tenants out",
    ),
    wrong(
        "spec.qos.estimation.rejectUnmeetable",
        True,
        "needs an estimate of the completion, and estimator ema has none; set estimator to rwt or",
    ),
    wrong(
        "spec.qos.estimation.sloGranularitySeconds",
        1e-6,
        "must be at least 0.001, not 1e-06; raise it",
    ),
    wrong(
        "spec.qos.estimation.lateGroups",
        "Late",
        "must be 'Keep', 'Defer' or 'Evict', not 'Late'",
    ),
    wrong(
        "spec.qos.estimation",
        {"lateGroups": "Defer", "allowClientDeadline": True},
        "needs deadlines, and forecasts that estimator ema has not; set allowClientDeadline: true "
        "and estimator: rwt or loadAware, or leave it out",
        fault_at="spec.qos.estimation.lateGroups",
    ),
    wrong(
        "spec.qos.estimation",
        {"lateGroups": "Evict", "estimator": "rwt"},
        "needs deadlines, and forecasts that estimator ema has not; set allowClientDeadline: true",
        fault_at="spec.qos.estimation.lateGroups",
    ),
    wrong(
        "spec.qos.allowClientPriority",
        "yes",
        "must be true or false, not 'yes'; write true or false without quotes",
    ),
    wrong(
        "spec.discovery.etcd.endpoints",
        ["http://etcd:2379"],
        "'http://etcd:2379' is not host:port; write it like etcd.example:2379 or "
        "[fd00::1]:2379, with a port of 1 to 65535",
        fault_at="spec.discovery.etcd.endpoints[0]",
    ),
    *(
        InvalidObject(
            at("spec.discovery.etcd.endpoints", ["[fd00::1]:2379", endpoint]),
            f"spec.discovery.etcd.endpoints[1]: {endpoint!r} {reason}",
            "spec.discovery.etcd.endpoints[1]",
        )
        for endpoint, reason in (
            ("fd00::1:2379", "is not host:port"),
            ("[fd00::1]", "is not host:port"),
            ("169.254.169.254:80", "is link-local, and no etcd is there; give the address"),
            ("[FE80::1]:80", "is link-local, and no etcd is there; give the address"),
        )
    ),
    wrong(
        "spec.discovery.etcd.endpoints",
        ["etcd:65535", "etcd:65536"],
        "'etcd:65536' is not host:port; write it like etcd.example:2379 or [fd00::1]:2379, "
        "with a port of 1 to 65535",
        fault_at="spec.discovery.etcd.endpoints[1]",
    ),
    wrong("spec.discovery.etcd.replicas", 2, "must be 1 or 3, not 2; change it to that"),
    wrong(
        "spec.discovery.etcd.replicas",
        3,
        "is needed by 3 members: one that lost its data could not come back; give storage, or",
        fault_at="spec.discovery.etcd.storage",
    ),
    wrong(
        "spec.discovery.etcd.tlsSecret",
        "tls",
        "is for endpoints, and none are given; give endpoints, or leave tlsSecret out",
    ),
    wrong(
        "spec.discovery.etcd",
        {"endpoints": ["etcd:2379"], "storage": {"size": "1Gi"}},
        "is for an etcd that is run here, and endpoints are given; leave storage or endpoints out",
        fault_at="spec.discovery.etcd.storage",
    ),
    wrong(
        "spec.discovery.etcd.storage",
        {"size": "big"},
        "'big' is not an amount of memory; write bytes, or",
        fault_at="spec.discovery.etcd.storage.size",
    ),
    wrong(
        "spec.service.annotations",
        {"a": 1},
        "must be text, not 1; put it in quotes",
        fault_at="spec.service.annotations.a",
    ),
    wrong("spec.service.apiKeySecret", "-keys", "'-keys' is not a name that Kubernetes takes"),
    wrong(
        "spec.placement",
        {},
        "says nothing; give domainLabel, minTransferGBps or gang, or remove it",
    ),
    *(
        wrong(
            "spec.placement",
            {**gang, "queue": "gpus"},
            "is Volcano's, and gang is not Volcano; set gang to Volcano, or remove queue",
            fault_at="spec.placement.queue",
        )
        for gang in ({"domainLabel": "rack"}, {"gang": "PodGroup"})
    ),
    *(
        wrong(
            "spec.placement",
            {"minTransferGBps": 1, "mode": mode},
            "is for domainLabel, which is left out; give domainLabel, or leave mode out",
            fault_at="spec.placement.mode",
        )
        for mode in ("Required", "Exclusive")
    ),
    *(
        InvalidObject(
            at("spec.placement", {"domainLabel": "rack", field: value}),
            f"spec.placement.{field}: is {value}, for workers of several pods, and no pool has "
            "any; leave it out, or give a pool podsPerReplica",
            None,
        )
        for field, value in (("gang", "PodGroup"), ("mode", "Exclusive"))
    ),
    wrong(
        "spec.placement",
        {"gang": "Kueue"},
        "must be 'PodGroup' or 'Volcano', not 'Kueue'; change it to that",
        fault_at="spec.placement.gang",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.placement", {"minTransferGBps": 1.5}),
        ),
        "spec.placement.minTransferGBps: means nothing beside mixed workers, which move "
        "no KV between pools; remove it",
        "spec.placement.minTransferGBps",
    ),
    wrong(
        "spec.roles.decode.resourceClaims",
        [{"name": "nic"}],
        "needs one source; give either resourceClaimName or resourceClaimTemplateName",
        fault_at="spec.roles.decode.resourceClaims[0]",
    ),
    wrong(
        "spec.roles.decode.resourceClaims",
        [{"name": "nic", "resourceClaimName": "a", "resourceClaimTemplateName": "a"}],
        "needs one source; give either",
        fault_at="spec.roles.decode.resourceClaims[0]",
    ),
    wrong(
        "spec.roles.decode.resourceClaims",
        [{"name": "nic", "resourceClaimName": "a"}, {"name": "nic", "resourceClaimName": "b"}],
        "'nic' names two claims of this role; give each its own name",
        field="spec.roles.decode.resourceClaims[1]",
    ),
    wrong(
        "spec.roles.decode.resourceClaims",
        [{"name": "NIC", "resourceClaimName": "a"}],
        "'NIC' is not a name that Kubernetes takes",
        fault_at="spec.roles.decode.resourceClaims[0].name",
    ),
    wrong(
        "spec.roles.decode.resourceClaims",
        [{"name": "nic", "resourceClaimName": "A"}],
        "'A' is not a name that Kubernetes takes",
        fault_at="spec.roles.decode.resourceClaims[0].resourceClaimName",
    ),
    wrong(
        "spec.roles.router",
        {"pools": [CPU], "resourceClaims": [{"name": "nic", "resourceClaimName": "a"}]},
        "is not for routers, which compute nothing; remove it",
        fault_at="spec.roles.router.resourceClaims",
    ),
    wrong(
        "spec.roles.decode.startupTimeoutSeconds",
        5400,
        "must be at most rollout.progressDeadlineSeconds (3600), when a roll out is given up; "
        "raise rollout.progressDeadlineSeconds too",
    ),
    wrong("spec.roles.decode.startupTimeoutSeconds", 9, "must be at least 10, not 9; raise it"),
    wrong("spec.roles.decode.sharedMemory", "64G B", "'64G B' is not an amount of memory; write"),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "maxSurge": 0},
        "and maxUnavailable are 0, so no worker could be replaced; set one of them to 1 or more",
        fault_at="spec.rollout.maxSurge",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "BlueGreen", "maxSurge": 2},
        "is for strategy: Rolling; set that, or leave one of them out",
        fault_at="spec.rollout.maxSurge",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Recreate", "maxUnavailable": "10%"},
        "is for strategy: Rolling; set that, or leave one of them out",
        fault_at="spec.rollout.maxUnavailable",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "maxSurge": "125%"},
        "'125%' is not a number of workers; write 0 to 4096 workers, or a percentage",
        fault_at="spec.rollout.maxSurge",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "maxSurge": 0, "maxUnavailable": "10%"},
        "10% of the 1 accelerators of prefill is less than one worker of 1; set at least "
        '"100%", or a number of workers',
        fault_at="spec.rollout.maxUnavailable",
        field=None,
    ),
    wrong(
        "spec.rollout",
        {"strategy": "BlueGreen", "onFailure": "Pause"},
        "is for strategy: Rolling; set that, or leave one of them out",
        fault_at="spec.rollout.onFailure",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Retry"},
        "must be 'Pause' or 'Rollback', not 'Retry'; change it to that",
        fault_at="spec.rollout.onFailure",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "bakeSeconds": 60},
        "is for roll outs with gates, which onFailure asks for; give onFailure too, or leave it "
        "out",
        fault_at="spec.rollout.bakeSeconds",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "whenUnknown": "Continue"},
        "is for roll outs with gates, which onFailure asks for; give onFailure too, or leave it "
        "out",
        fault_at="spec.rollout.whenUnknown",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "minRequests": 9},
        "is for roll outs with gates, which onFailure asks for; give onFailure too, or leave it "
        "out",
        fault_at="spec.rollout.minRequests",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Pause", "minRequests": 0},
        "must be at least 1, not 0; raise it",
        fault_at="spec.rollout.minRequests",
    ),
    *(
        InvalidObject(
            both(
                at(
                    "spec.rollout",
                    {"strategy": "Rolling", "onFailure": "Pause", "minRequests": 9},
                ),
                at("spec.autoscale", autoscale),
            ),
            "spec.rollout.minRequests: asks for latencies that nothing reads, or that have no "
            "objective; set autoscale.mode to Advise or On and give autoscale.objective.ttft or "
            "itl, or leave it out",
            "spec.rollout.minRequests",
        )
        for autoscale in (
            {},
            {"mode": "Advise"},
            {"mode": "Advise", "objective": {"queue": {"seconds": 1.0}}},
            {"objective": {"ttft": {"seconds": 1.0}}},
        )
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Pause", "whenUnknown": "Fail"},
        "must be 'Pause' or 'Continue', not 'Fail'; change it to that",
        fault_at="spec.rollout.whenUnknown",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Pause", "bakeSeconds": -1},
        "must be at least 0, not -1; raise it",
        fault_at="spec.rollout.bakeSeconds",
    ),
    wrong(
        "spec.rollout",
        {"strategy": "Rolling", "onFailure": "Pause", "bakeSeconds": 604_801},
        "must be at most 604800, not 604801; lower it",
        fault_at="spec.rollout.bakeSeconds",
    ),
    InvalidObject(
        both(
            at("spec.roles.picker", {"pools": [CPU]}),
            at("spec.service.endpointPicker", {}),
            at("spec.rollout.strategy", "Rolling"),
        ),
        "spec.rollout.strategy: Rolling is for clusters without pickers of their own",
        "spec.rollout.strategy",
    ),
    InvalidObject(
        both(
            SLEEPS,
            at("spec.roles.router", {"pools": [CPU]}),
            at("spec.rollout.strategy", "Rolling"),
        ),
        "spec.rollout.strategy: Rolling takes routers away for a while",
        "spec.rollout.strategy",
    ),
    wrong("spec.networkPolicy.enabled", 1, "must be true or false, not 1; write true or false"),
    wrong("spec.model.name", 7, "must be text, not 7; put it in quotes"),
]
