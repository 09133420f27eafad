"""PDCluster objects that are wrong: one table for the model (tests/operator) and for the API server
(tests/apiserver).
"""

from dataclasses import dataclass

from tests.schema.object_cases import CPU, HUB, NIGHT, POOL, Change, at, both, without
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


def nested(levels: int) -> object:
    """So many maps within each other."""
    value: object = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


BAD = [
    InvalidObject(
        at("apiVersion", "pdcluster.io/v2"),
        "apiVersion: must be 'pdcluster.io/v1alpha1', not 'pdcluster.io/v2'; change it to that",
        None,
    ),
    InvalidObject(without("metadata.name"), "metadata.name: is required; add it", "metadata.name"),
    InvalidObject(
        at("metadata.name", "My_Chat"),
        "metadata.name: 'My_Chat' is not a name that Kubernetes takes; use at most 63 lower-case "
        "letters",
        "metadata.name",
    ),
    InvalidObject(
        at("metadata.name", "c" * 32),
        "metadata.name: "
        + "c" * 32
        + "-prefill-cpu with a revision is 53 characters; a workload's name holds 52; shorten",
        "metadata.name",
    ),
    InvalidObject(
        at("metadata.namespace", "-a"),
        "metadata.namespace: '-a' is not a namespace; use at most 63 lower-case",
        None,
    ),
    InvalidObject(without("spec.model"), "spec.model: is required; add it", "spec.model"),
    InvalidObject(
        at("spec.model.path", ""),
        "spec.model.path: must not be empty text, not ''; write its name or path",
        "spec.model.path",
    ),
    InvalidObject(
        at("spec.model.dtype", "float16"),
        "spec.model.dtype: must be 'auto', 'float32' or 'bfloat16', not 'float16'; change it to "
        "that",
        "spec.model.dtype",
    ),
    InvalidObject(
        at("spec.model.toolParser", "gpt"),
        "spec.model.toolParser: must be 'auto', 'none', 'hermes', 'llama3_json', 'mistral', "
        "'pythonic', 'qwen' or 'qwen3_coder', not 'gpt'",
        "spec.model.toolParser",
    ),
    InvalidObject(
        at("spec.model.reasoningParser", "o1"),
        "spec.model.reasoningParser: must be 'auto', 'none', 'deepseek_r1' or 'qwen3', not 'o1'; "
        "change it to that",
        "spec.model.reasoningParser",
    ),
    InvalidObject(
        at("spec.model.chatTemplate", ""),
        "spec.model.chatTemplate: must not be empty text, not ''",
        "spec.model.chatTemplate",
    ),
    InvalidObject(
        at("spec.model.chatTemplate", "x" * 65_537),
        "spec.model.chatTemplate:",
        "spec.model.chatTemplate",
    ),
    InvalidObject(
        at("spec.model.chatTemplate", "chatml-tool"),
        "spec.model.chatTemplate: 'chatml-tool' is neither chatml-tools nor Jinja text that names "
        "messages; did you mean chatml-tools?",
        "spec.model.chatTemplate",
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
    InvalidObject(
        at("spec.model.huggingFace", HUB["huggingFace"]),
        "spec.model: needs either path or huggingFace, and not both",
        "spec.model",
    ),
    InvalidObject(
        at("spec.model", {**HUB, "pvc": {"claimName": "models"}}),
        "spec.model.pvc: needs the model's path in it; give path, or leave pvc out",
        "spec.model.pvc",
    ),
    InvalidObject(
        at("spec.model.pvc", {}),
        "spec.model.pvc.claimName: is required; add it",
        "spec.model.pvc.claimName",
    ),
    InvalidObject(
        at("spec.model.nodeCache", "/cache"),
        "spec.model.nodeCache: keeps downloads, and nothing is downloaded; give huggingFace, or "
        "leave nodeCache out",
        "spec.model.nodeCache",
    ),
    InvalidObject(
        at("spec.model", {**HUB, "nodeCache": "cache"}),
        "spec.model.nodeCache: 'cache' is not an absolute path; write it like /var/cache/models",
        "spec.model.nodeCache",
    ),
    InvalidObject(
        at("spec.model", {"name": "tiny", "huggingFace": {"repo": "https://hub.example/a/b"}}),
        "spec.model.huggingFace.repo: 'https://hub.example/a/b' is not a repository; write it like "
        "HuggingFaceTB/",
        "spec.model.huggingFace.repo",
    ),
    InvalidObject(
        at(
            "spec.model",
            {"name": "tiny", "huggingFace": {"repo": "a/b", "tokenSecret": "My_Token"}},
        ),
        "spec.model.huggingFace.tokenSecret: 'My_Token' is not a name that Kubernetes takes; use "
        "lower-case letters",
        "spec.model.huggingFace.tokenSecret",
    ),
    InvalidObject(
        at("spec.image.pullSecrets", ["a" * 254]),
        "spec.image.pullSecrets[0]: must have at most 253 characters, not 'aaaaa",
        "spec.image.pullSecrets[0]",
    ),
    InvalidObject(
        at("spec.image.pullPolicy", "Sometimes"),
        "spec.image.pullPolicy: must be 'Always', 'IfNotPresent' or 'Never', not 'Sometimes'",
        "spec.image.pullPolicy",
    ),
    InvalidObject(
        at("spec.roles.router", {"pools": [CPU], "engine": {"blockSize": 16}}),
        "spec.roles.router.engine: is not for routers, which have no engine; remove it",
        "spec.roles.router.engine",
    ),
    InvalidObject(
        at("spec.roles.router", {"pools": [{**CPU, "gpu": "H100"}]}),
        "spec.roles.router.pools: must have gpu: cpu, since a router computes nothing, not H100; "
        "leave gpu out",
        "spec.roles.router.pools",
    ),
    InvalidObject(
        at("spec.routing.relaying", {"enabled": True}),
        "spec.routing.relaying: is for routers, and there are none; give roles.router, or leave "
        "routing.relaying out",
        "spec.routing",
    ),
    InvalidObject(
        without("spec.roles.decode"),
        "spec.roles: must be exactly prefill and decode, or mixed, not prefill; add the missing "
        "role or remove the others",
        "spec.roles",
    ),
    InvalidObject(
        at("spec.roles.mixed", {"pools": [CPU]}),
        "spec.roles: must be exactly prefill and decode, or mixed, not decode and ",
        "spec.roles",
    ),
    InvalidObject(
        at("spec.roles.decode.pools", []),
        "spec.roles.decode.pools: must hold 1 to 16 pools, not 0; add or remove pools",
        "spec.roles.decode.pools",
    ),
    InvalidObject(
        at(
            "spec.roles.decode.pools",
            [{"name": f"p{number}", "replicas": 0} for number in range(17)],
        ),
        "spec.roles.decode.pools: must hold 1 to 16 pools, not 17; add or remove pools",
        "spec.roles.decode.pools",
    ),
    InvalidObject(
        at("spec.roles.decode.pools", {}),
        "spec.roles.decode.pools: must be a list, not {}; write its entries as `- ...` lines",
        "spec.roles.decode.pools",
    ),
    InvalidObject(
        at("spec.roles.decode.pools", [CPU, CPU]),
        "spec.roles.decode.pools[1].name: 'cpu' names two pools of this role; give each pool its "
        "own name",
        "spec.roles.decode.pools[1]",
    ),
    InvalidObject(
        at(f"{POOL}.name", "Cpu"),
        "spec.roles.decode.pools[0].name: 'Cpu' is not a name that Kubernetes takes",
        "spec.roles.decode.pools[0].name",
    ),
    InvalidObject(
        at(f"{POOL}.gpu", "A100"),
        "spec.roles.decode.pools[0].gpu: 'A100' is not a known accelerator; use one of B200, B300, "
        "GB200, GB300, H100, H200, cpu",
        "spec.roles.decode.pools",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"device": "cuda"}),
        "spec.roles.decode.pools[0].gpu: is cpu, and engine.device: cuda needs an accelerator; "
        "give the pool another gpu, or leave",
        "spec.roles.decode",
    ),
    InvalidObject(
        at("spec.engine", {"device": "gpu"}),
        "spec.engine.device: must be 'auto', 'cpu' or 'cuda', not 'gpu'; change it to that",
        "spec.engine.device",
    ),
    InvalidObject(
        at("spec.accelerators", {f"gpu{number}": {} for number in range(65)}),
        "spec.accelerators: must have at most 64 entries, not {",
        "spec.accelerators",
    ),
    InvalidObject(
        at("spec.accelerators", {"X": {"memoryBytes": 288}}),
        "spec.accelerators.X.memoryBytes: must be at least 1000000000, not 288; raise it",
        "spec.accelerators.X.memoryBytes",
    ),
    InvalidObject(
        at("spec.accelerators", {"X": {"resource": "x" * 318}}),
        "spec.accelerators.X.resource: must have at most 317 characters, not ",
        "spec.accelerators.X.resource",
    ),
    InvalidObject(
        at("spec.accelerators", {"X": {"resorce": "x"}}),
        "spec.accelerators.X.resorce: unknown field; did you mean resource?",
        "spec.accelerators.X.resorce",
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
    InvalidObject(
        at(
            "spec.roles.decode.pools",
            [{"name": f"p{number}", "replicas": 512} for number in range(8)],
        ),
        "spec.roles: replicas of all pools must be at most 4096 together, not 4097; lower some, or "
        "make another PDCluster",
        "spec.roles",
    ),
    InvalidObject(
        at(
            "spec.roles.decode.pools",
            [{"name": f"p{number}", "replicas": 0} for number in range(16)],
        ),
        "spec.roles: pools of all roles must be at most 16 together, not 17; join some, or make "
        "another PDCluster",
        "spec.roles",
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
    InvalidObject(
        at("spec.service.annotations", {"notes": "a" * 128 * 1024}),
        "spec: has 131267 bytes as JSON, and may have 131072 at most; shorten the longest",
        None,
    ),
    InvalidObject(
        at("spec.podTemplate", {"spec": nested(100)}),
        "spec.podTemplate.spec.a.a: has more than 100 levels of maps and lists; no field of a pod",
        None,
    ),
    InvalidObject(
        at(f"{POOL}.gpusPerNode", 1),
        "spec.roles.decode.pools[0].gpusPerNode: unknown field; ",
        "spec.roles.decode.pools[0].gpusPerNode",
    ),
    *(
        InvalidObject(
            at(path.replace("[0]", ".0"), 9), f"{path}: must be at most 8, not 9; lower it", path
        )
        for path in (
            "spec.roles.decode.pools[0].gpusPerReplica",
            "spec.engine.tensorParallelSize",
            "spec.engine.pipelineParallelSize",
        )
    ),
    InvalidObject(
        at("spec.engine", {"numBlocks": 4, "dataParallelSize": 5}),
        "spec.roles.prefill.engine.numBlocks: must be at least dataParallelSize (5), whose engines "
        "share them, not 4; raise numBlocks",
        "spec.roles.prefill",
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
    InvalidObject(
        at("spec.engine", {"tensorParallelSize": 4, "pipelineParallelSize": 4}),
        "spec.roles.prefill.engine.tensorParallelSize: tensorParallelSize (4) times "
        "pipelineParallelSize (4) is 16 ranks, over the 8",
        "spec.roles",
    ),
    InvalidObject(
        both(
            at("spec.roles.prefill.engine", {"tensorParallelSize": 2}),
            at("spec.roles.decode.engine", {"tensorParallelSize": 3}),
        ),
        "spec.roles.decode.engine.tensorParallelSize: KV heads move between roles in whole slices, "
        "but tensorParallelSize is 2 for prefill",
        "spec.roles",
    ),
    InvalidObject(
        without(f"{POOL}.replicas"),
        "spec.roles.decode.pools[0].replicas: is required; add it",
        "spec.roles.decode.pools[0].replicas",
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
    InvalidObject(
        at(
            "spec.roles.decode.pools",
            [{"name": "cpu", "replicas": 2, "minReplicas": 3, "maxReplicas": 2}],
        ),
        "spec.roles.decode.pools[0].minReplicas: must be at most maxReplicas (2), not 3; lower "
        "minReplicas or raise maxReplicas",
        "spec.roles.decode.pools[0].minReplicas",
    ),
    InvalidObject(
        at(f"{POOL}.replica", 1),
        "spec.roles.decode.pools[0].replica: unknown field; did you mean replicas?",
        "spec.roles.decode.pools[0].replica",
    ),
    InvalidObject(
        at("spec.roles.decode.resources.limits", {"memory": "16GB"}),
        "spec.roles.decode.resources.limits.memory: '16GB' is not an amount; write a whole number, "
        "or a quantity",
        "spec.roles.decode.resources.limits[memory]",
    ),
    InvalidObject(
        at("spec.roles.decode.resources", {"requests": {"cpu": 4}, "limits": {"cpu": "1500m"}}),
        "spec.roles.decode.resources.requests.cpu: must be at most the limit of cpu (1500m), not "
        "4; lower the request or raise the limit",
        "spec.roles.decode.resources.requests",
    ),
    InvalidObject(
        at("spec.roles.decode.resources.requests", {"cpu": 0.5}),
        "spec.roles.decode.resources.requests.cpu: 0.5 is not an amount; write a whole number, or "
        "a quantity",
        "spec.roles.decode.resources.requests.cpu",
    ),
    InvalidObject(
        at("spec.podTemplate", {"template": {}}),
        "spec.podTemplate.template: 'template' is no part of a pod template; use metadata and spec",
        "spec.podTemplate.template",
    ),
    InvalidObject(
        at("spec.podTemplate", {"spec": []}),
        "spec.podTemplate.spec: must be a section of fields, not []; write `field: value` lines "
        "below it",
        "spec.podTemplate.spec",
    ),
    InvalidObject(
        at("spec.podTemplate", []),
        "spec.podTemplate: must be a section of fields, not []",
        "spec.podTemplate",
    ),
    InvalidObject(
        at("spec.monitoring", {"labels": {"release": "prometheus"}}),
        "spec.monitoring: has moved to the operator's chart; remove it, and set monitoring in the "
        "values of the chart",
        "spec.monitoring",
    ),
    InvalidObject(
        at("spec.hpa", {}),
        "spec.hpa: unknown field; known here: model, roles, image, engine, accelerators",
        "spec.hpa",
    ),
    InvalidObject(
        at("spec.autoscale.mode", "Auto"),
        "spec.autoscale.mode: must be 'Off', 'Advise' or 'On', not 'Auto'; change it to that",
        "spec.autoscale.mode",
    ),
    InvalidObject(
        at("spec.autoscale.mode", False),
        "spec.autoscale.mode: must be 'Off', 'Advise' or 'On', not False; put it in quotes, since "
        "YAML takes a plain On or Off for true or",
        "spec.autoscale.mode",
    ),
    InvalidObject(
        at("spec.autoscale.prefil", {}),
        "spec.autoscale.prefil: unknown field; did you mean prefill?",
        "spec.autoscale.prefil",
    ),
    InvalidObject(
        at("spec.autoscale.intervalSeconds", 4),
        "spec.autoscale.intervalSeconds: must be at least 5, not 4; raise it",
        "spec.autoscale.intervalSeconds",
    ),
    InvalidObject(
        at("spec.autoscale.prefill", {"queueDown": 8}),
        "spec.autoscale.prefill.queueDown: must be less than queueUp (8), not 8; "
        "lower it, or raise the scale-up threshold",
        "spec.autoscale.prefill.queueDown",
    ),
    InvalidObject(
        at("spec.autoscale.decode", {"kvUsageUp": 0.2}),
        "spec.autoscale.decode.kvUsageDown: must be less than kvUsageUp (0.2), not 0.3; "
        "lower it, or raise the scale-up threshold",
        "spec.autoscale.decode.kvUsageDown",
    ),
    InvalidObject(
        at("spec.autoscale.decode.kvUsageUp", 75),
        "spec.autoscale.decode.kvUsageUp: must be at most 1, not 75; lower it",
        "spec.autoscale.decode.kvUsageUp",
    ),
    InvalidObject(
        at("spec.autoscale.ratio", {"min": 2, "max": 1}),
        "spec.autoscale.ratio.min: must be at most max (1), not 2; lower min or raise max",
        "spec.autoscale.ratio.min",
    ),
    InvalidObject(
        at("spec.autoscale.budget", {"perGpu": {"A100": 1}}),
        "spec.autoscale.budget.perGpu.A100: 'A100' is not a known accelerator; use one of B200, "
        "B300, GB200, GB300, H100, H200, cpu",
        "spec.autoscale.budget.perGpu",
    ),
    InvalidObject(
        at("spec.autoscale.cost", {"cpu": 1, "A100": 0.5}),
        "spec.autoscale.cost.A100: 'A100' is not a known accelerator; use one of B200, B300,",
        "spec.autoscale.cost",
    ),
    InvalidObject(
        at("spec.autoscale.cost", {"cpu": 0}),
        "spec.autoscale.cost.cpu: must be more than 0, not 0; raise it",
        "spec.autoscale.cost.cpu",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "pool": "b200"}]),
        "spec.autoscale.schedules[0].pool: 'b200' is no pool of role decode; use one of cpu, or "
        "remove the schedule",
        "spec.autoscale.schedules",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [NIGHT, {**NIGHT, "start": "23:00"}]),
        "spec.autoscale.schedules[1].name: night is given twice; give each schedule a name of its "
        "own",
        "spec.autoscale.schedules",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "maxReplicas": None}]),
        "spec.autoscale.schedules[0]: the schedule changes nothing; give minReplicas, "
        "maxReplicas or both",
        "spec.autoscale.schedules[0]",
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
        "spec.autoscale.prefill: there is no prefill beside mixed workers; remove it, they go by "
        "the thresholds of autoscale.decode",
        "spec.autoscale.prefill",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}), at("spec.autoscale.ratio", {"min": 0.5})
        ),
        "spec.autoscale.ratio: mixed workers are one role, which has no ratio to another; "
        "remove it",
        "spec.autoscale.ratio",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "role": "mixed"}]),
        "spec.autoscale.schedules[0].role: 'mixed' is no role of this cluster; use one of prefill, "
        "decode, or remove the schedule",
        "spec.autoscale.schedules",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.routing.offload", {"prefillQueueMax": 9}),
        ),
        "spec.routing.offload: mixed workers prefill what they decode, and no prefill is routed; "
        "remove it",
        "spec.routing.offload",
    ),
    InvalidObject(
        both(
            at("spec.roles.prefill.pools.0.maxReplicas", 4),
            at("spec.autoscale", {"mode": "On", "budget": {"perGpu": {"cpu": 8}}}),
        ),
        "spec.autoscale.mode: On needs a ceiling, and pool cpu of role decode has no maxReplicas;"
        " give maxReplicas to every pool, or set autoscale.budget.total",
        "spec.autoscale.mode",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "start": "8:00"}]),
        "spec.autoscale.schedules[0].start: '8:00' is not a time of day; write HH:MM, as in 08:30",
        "spec.autoscale.schedules[0].start",
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "timeZone": "Mars/Olympus"}]),
        "spec.autoscale.schedules[0].timeZone: 'Mars/Olympus' is not a known time zone; use a name "
        "of the tz database",
        None,
    ),
    InvalidObject(
        at("spec.autoscale.schedules", [{**NIGHT, "minReplicas": 3, "maxReplicas": 2}]),
        "spec.autoscale.schedules[0].minReplicas: must be at most maxReplicas (2), not 3; lower "
        "minReplicas or raise maxReplicas",
        "spec.autoscale.schedules[0].minReplicas",
    ),
    InvalidObject(
        at("spec.rollout.progressDeadlineSeconds", 29),
        "spec.rollout.progressDeadlineSeconds: must be at least 30, not 29; raise it",
        "spec.rollout.progressDeadlineSeconds",
    ),
    InvalidObject(
        at("spec.rollout.progressDeadlineSeconds", 604801),
        "spec.rollout.progressDeadlineSeconds: must be at most 604800, not 604801; lower it",
        "spec.rollout.progressDeadlineSeconds",
    ),
    InvalidObject(
        at("spec.rollout.drainTimeoutSeconds", 0),
        "spec.rollout.drainTimeoutSeconds: must be at least 1, not 0; raise it",
        "spec.rollout.drainTimeoutSeconds",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"blockSize": 32}),
        "spec.roles.decode.engine.blockSize: KV blocks move between roles, but blockSize is 16 for "
        "prefill and 32 for decode; give both",
        "spec.roles",
    ),
    InvalidObject(
        at("spec.roles.prefill.engine", {"batchInvariant": True}),
        "spec.roles.decode.engine.batchInvariant: a remote prefill must give the same bits as a "
        "local one, but one role is batch-invariant",
        "spec.roles",
    ),
    InvalidObject(
        both(at("spec.engine.batchInvariant", True), at("spec.roles.decode.pools.0.gpu", "H100")),
        "spec.roles.decode.engine.batchInvariant: is for CPUs so far, and gpu of a pool is not "
        "cpu; leave it out, or set engine.device",
        "spec.roles.decode",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"maxSequences": 512}),
        "spec.roles.decode.engine.maxBatchedTokens: must be at least maxSequences (512), since a "
        "step computes",
        "spec.roles.decode",
    ),
    InvalidObject(
        at("spec.engine", {"prefillDelayer": {"maxDelayPasses": 3}}),
        "spec.roles.decode.engine.prefillDelayer: is for prefill and mixed workers, and this holds "
        "for decode; set it in roles.prefill",
        "spec.roles.decode",
    ),
    InvalidObject(
        at("spec.roles.prefill.engine", {"prefillDelayer": {"maxDelayPasses": 0}}),
        "spec.roles.prefill.engine.prefillDelayer.maxDelayPasses: must be at least 1, not 0",
        "spec.roles.prefill.engine.prefillDelayer.maxDelayPasses",
    ),
    InvalidObject(
        at("spec.engine", {"speculation": {}}),
        "spec.roles.prefill.engine.speculation: is for decode and mixed workers, and this holds "
        "for prefill; set it in roles.decode",
        "spec.roles.prefill",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"speculation": {"numTokens": 17}}),
        "spec.roles.decode.engine.speculation.numTokens: must be at most 16, not 17",
        "spec.roles.decode.engine.speculation.numTokens",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"speculation": {"method": "draft"}}),
        "spec.roles.decode.engine.speculation.draftModel: is for method: draft, which needs it; "
        "give the folder",
        "spec.roles.decode.engine.speculation.draftModel",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"speculation": {"draftModel": "/small"}}),
        "spec.roles.decode.engine.speculation.draftModel: is for method: draft, which needs it; "
        "give the folder",
        "spec.roles.decode.engine.speculation.draftModel",
    ),
    InvalidObject(
        at("spec.roles.decode.engine", {"speculation": {"promptLookupMin": 6}}),
        "spec.roles.decode.engine.speculation.promptLookupMin: must be at most promptLookupMax "
        "(5), not 6; lower the one",
        "spec.roles.decode.engine.speculation.promptLookupMin",
    ),
    InvalidObject(
        at("spec.engine", {"dataParallelSize": 9}),
        "spec.engine.dataParallelSize: must be at most 8, not 9; lower it",
        "spec.engine.dataParallelSize",
    ),
    InvalidObject(
        at("spec.engine", {"threads": 1025}),
        "spec.engine.threads: must be at most 1024, not 1025; lower it",
        "spec.engine.threads",
    ),
    InvalidObject(
        at("spec.engine", {"maxBatchedTokens": 16_777_217}),
        "spec.engine.maxBatchedTokens: must be at most 16777216, not 16777217; lower it",
        "spec.engine.maxBatchedTokens",
    ),
    InvalidObject(
        at("spec.engine", {"maxBatchedTokens": 100_000, "maxSequences": 65_537}),
        "spec.engine.maxSequences: must be at most 65536, not 65537; lower it",
        "spec.engine.maxSequences",
    ),
    InvalidObject(
        at("spec.engine", None), "spec.engine: is empty; give it a value or remove the key", None
    ),
    InvalidObject(
        at("spec.engine", "big"),
        "spec.engine: must be a section of fields, not 'big'; write `field: value` lines below it",
        "spec.engine",
    ),
    InvalidObject(
        at("spec.engine.maxSequences", 1.5),
        "spec.engine.maxSequences: must be a whole number, not 1.5",
        "spec.engine.maxSequences",
    ),
    InvalidObject(
        at("spec.engine.prefixCaching", "yes"),
        "spec.engine.prefixCaching: must be true or false, not 'yes'; write true or false without "
        "quotes",
        "spec.engine.prefixCaching",
    ),
    InvalidObject(
        at("spec.engine.kvCacheMemory", "512MB"),
        "spec.engine.kvCacheMemory: '512MB' is not an amount of memory; write bytes, or a number "
        "with Ki, Mi, Gi",
        "spec.engine.kvCacheMemory",
    ),
    InvalidObject(
        at("spec.engine.kvCacheMemory", 0),
        "spec.engine.kvCacheMemory: must be at least 1, not 0; raise it",
        "spec.engine.kvCacheMemory",
    ),
    InvalidObject(
        at("spec.engine.deviceMemoryShare", 90),
        "spec.engine.deviceMemoryShare: must be at most 1, not 90; lower it",
        "spec.engine.deviceMemoryShare",
    ),
    InvalidObject(
        at("spec.engine.deviceMemoryShare", 0),
        "spec.engine.deviceMemoryShare: must be more than 0, not 0; raise it",
        "spec.engine.deviceMemoryShare",
    ),
    InvalidObject(
        at("spec.engine.kvCacheMemory", "0.0Gi"),
        "spec.engine.kvCacheMemory: must be at least 1, not ",
        "spec.engine.kvCacheMemory",
    ),
    InvalidObject(
        at("spec.engine.kvCacheDtype", "auto"),
        "spec.engine.kvCacheDtype: unknown field; did you mean kvCacheMemory?",
        "spec.engine.kvCacheDtype",
    ),
    *(InvalidObject(*case) for case in WRONG_NUMBERS),
    *(InvalidObject(*case) for case in WRONG_SCHEDULING),
    *(InvalidObject(*case) for case in WRONG_STOCK_ENGINES),
    InvalidObject(
        at("spec.engine.fenceTimeoutSeconds", 0),
        "spec.engine.fenceTimeoutSeconds: must be more than 0, not 0; raise it",
        "spec.engine.fenceTimeoutSeconds",
    ),
    InvalidObject(
        at("spec.engine.admissionWatermark", 1.5),
        "spec.engine.admissionWatermark: must be at most 1, not 1.5; lower it",
        "spec.engine.admissionWatermark",
    ),
    InvalidObject(
        at("spec.qos.admission.maxQueuedTokens", -1),
        "spec.qos.admission.maxQueuedTokens: must be at least 0, not -1; raise it",
        "spec.qos.admission.maxQueuedTokens",
    ),
    InvalidObject(
        at("spec.routing.offlod", {}),
        "spec.routing.offlod: unknown field; did you mean offload?",
        "spec.routing.offlod",
    ),
    InvalidObject(
        at("spec.routing.offload.policy", "random"),
        "spec.routing.offload.policy: must be 'rule', 'measured', 'score' or 'sloFeedback', "
        "not 'random'",
        "spec.routing.offload.policy",
    ),
    *(
        InvalidObject(
            at("spec.routing.offload.policy", name),
            f"spec.routing.offload.policy: {name} was removed; use rule or measured",
            "spec.routing.offload.policy",
        )
        for name in ("islBounding", "prefillLoad", "islOrLoad")
    ),
    InvalidObject(
        at("spec.routing.offload.prefillLoad", {"busyBatches": 2}),
        "spec.routing.offload.prefillLoad: was removed with the policies that it was for; remove "
        "it, and set policy to rule or measured",
        "spec.routing.offload.prefillLoad",
    ),
    InvalidObject(
        at("spec.routing.offload.sloFeedback", {"minThreshold": 9, "maxThreshold": 8}),
        "spec.routing.offload.sloFeedback.minThreshold: must be at most maxThreshold (8), not 9; "
        "lower minThreshold or raise maxThreshold",
        "spec.routing.offload.sloFeedback.minThreshold",
    ),
    InvalidObject(
        at("spec.routing.offload.decodeBusyRatio", 0),
        "spec.routing.offload.decodeBusyRatio: must be more than 0, not 0; raise it",
        "spec.routing.offload.decodeBusyRatio",
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
    InvalidObject(
        at("spec.routing.prefillScore.loadWeight", "1"),
        "spec.routing.prefillScore.loadWeight: must be a number, not '1'; write it without quotes",
        "spec.routing.prefillScore.loadWeight",
    ),
    InvalidObject(
        at("spec.routing.prefillScore.loadWeight", float("inf")),
        "spec.routing.prefillScore.loadWeight: must be a finite number, not inf; write one",
        None,
    ),
    InvalidObject(
        at("spec.service.cors", {"allowedOrigins": ["https://a.example/"]}),
        "spec.service.cors.allowedOrigins[0]: 'https://a.example/' is not an origin; write it as a "
        "browser sends it, like https://chat.",
        "spec.service.cors.allowedOrigins[0]",
    ),
    InvalidObject(
        at("spec.service.cors", {"allowedHeaders": ["a b"]}),
        "spec.service.cors.allowedHeaders[0]: 'a b' is not a header's name; write it like "
        "authorization",
        "spec.service.cors.allowedHeaders[0]",
    ),
    InvalidObject(
        at("spec.service.cors", {"allowedOrigins": ["*"], "allowCredentials": True}),
        "spec.service.cors.allowCredentials: is not for every origin; name them in allowedOrigins "
        "in place of *, or leave it out",
        "spec.service.cors.allowCredentials",
    ),
    InvalidObject(
        at("spec.service.limits.maxHeaderBytes", 100),
        "spec.service.limits.maxHeaderBytes: must be at least 4096, not 100; raise it",
        "spec.service.limits.maxHeaderBytes",
    ),
    InvalidObject(
        at("spec.qos.admission.maxQueuedRequests", 0),
        "spec.qos.admission.maxQueuedRequests: must be at least 1, not 0; raise it",
        "spec.qos.admission.maxQueuedRequests",
    ),
    InvalidObject(
        at("spec.qos.slo.ttftMilliseconds", 0),
        "spec.qos.slo.ttftMilliseconds: must be more than 0, not 0; raise it",
        "spec.qos.slo.ttftMilliseconds",
    ),
    InvalidObject(
        at("spec.qos.slo.tpotMilliseconds", -1),
        "spec.qos.slo.tpotMilliseconds: must be more than 0, not -1; raise it",
        "spec.qos.slo.tpotMilliseconds",
    ),
    InvalidObject(
        at("spec.qos.lowPriority.thresholdMilliseconds", 0),
        "spec.qos.lowPriority.thresholdMilliseconds: must be more than 0, not 0; raise it",
        "spec.qos.lowPriority.thresholdMilliseconds",
    ),
    InvalidObject(
        at("spec.qos.degradation.maxTokens", 0),
        "spec.qos.degradation.maxTokens: must be at least 1, not 0; raise it",
        "spec.qos.degradation.maxTokens",
    ),
    InvalidObject(
        at("spec.qos.degradation.maxPromptTokens", 0),
        "spec.qos.degradation.maxPromptTokens: must be at least 1, not 0; raise it",
        "spec.qos.degradation.maxPromptTokens",
    ),
    InvalidObject(
        at("spec.qos.degradation.atPressure", 1.5),
        "spec.qos.degradation.atPressure: must be at most 1, not 1.5; lower it",
        "spec.qos.degradation.atPressure",
    ),
    InvalidObject(
        at("spec.qos.tenantDefaults.requestsPerSecond", 0),
        "spec.qos.tenantDefaults.requestsPerSecond: must be more than 0, not 0; raise it",
        "spec.qos.tenantDefaults.requestsPerSecond",
    ),
    InvalidObject(
        at("spec.qos.tenantDefaults.maxConcurrentRequests", 0),
        "spec.qos.tenantDefaults.maxConcurrentRequests: must be at least 1, not 0; raise it",
        "spec.qos.tenantDefaults.maxConcurrentRequests",
    ),
    InvalidObject(
        at("spec.qos.tenantDefaults.tokensPerMinute", 0),
        "spec.qos.tenantDefaults.tokensPerMinute: must be at least 1, not 0; raise it",
        "spec.qos.tenantDefaults.tokensPerMinute",
    ),
    InvalidObject(
        at("spec.qos.tenantDefaults.priority", "urgent"),
        "spec.qos.tenantDefaults.priority: must be 'high', 'normal' or 'low', not 'urgent'; change "
        "it to that",
        "spec.qos.tenantDefaults.priority",
    ),
    InvalidObject(
        at("spec.qos.tenants", {"alice": {"priority": "low"}}),
        "spec.qos.tenants: is for API keys, and no key is asked for; give service.apiKeySecret, or "
        "leave qos.tenants out",
        "spec.qos",
    ),
    InvalidObject(
        at("spec.qos.estimation.estimator", "oracle"),
        "spec.qos.estimation.estimator: must be 'ema', 'rwt' or 'loadAware', not 'oracle'; change "
        "it to that",
        "spec.qos.estimation.estimator",
    ),
    InvalidObject(
        at("spec.qos.estimation.rejectUnmeetable", True),
        "spec.qos.estimation.rejectUnmeetable: needs an estimate of the completion, and estimator "
        "ema has none; set estimator to rwt or",
        "spec.qos.estimation.rejectUnmeetable",
    ),
    InvalidObject(
        at("spec.qos.estimation.sloGranularitySeconds", 0),
        "spec.qos.estimation.sloGranularitySeconds: must be more than 0, not 0; raise it",
        "spec.qos.estimation.sloGranularitySeconds",
    ),
    InvalidObject(
        at("spec.qos.estimation.presetTokenMilliseconds", 0),
        "spec.qos.estimation.presetTokenMilliseconds: must be more than 0, not 0; raise it",
        "spec.qos.estimation.presetTokenMilliseconds",
    ),
    InvalidObject(
        at("spec.qos.estimation.presetOutputTokens", 0),
        "spec.qos.estimation.presetOutputTokens: must be at least 1, not 0; raise it",
        "spec.qos.estimation.presetOutputTokens",
    ),
    InvalidObject(
        at("spec.qos.stallSeconds", 0),
        "spec.qos.stallSeconds: must be at least 1, not 0; raise it",
        "spec.qos.stallSeconds",
    ),
    InvalidObject(
        at("spec.qos.stallSeconds", 3601),
        "spec.qos.stallSeconds: must be at most 3600, not 3601; lower it",
        "spec.qos.stallSeconds",
    ),
    InvalidObject(
        at("spec.qos.allowClientPriority", "yes"),
        "spec.qos.allowClientPriority: must be true or false, not 'yes'; write true or false "
        "without quotes",
        "spec.qos.allowClientPriority",
    ),
    InvalidObject(
        at("spec.discovery.etcd.endpoints", ["http://etcd:2379"]),
        "spec.discovery.etcd.endpoints[0]: 'http://etcd:2379' is not host:port; write it like "
        "etcd.example:2379 or [fd00::1]:2379, with a port of 1 to 65535",
        "spec.discovery.etcd.endpoints[0]",
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
    InvalidObject(
        at("spec.discovery.etcd.endpoints", ["etcd:65535", "etcd:65536"]),
        "spec.discovery.etcd.endpoints[1]: 'etcd:65536' is not host:port; write it like "
        "etcd.example:2379 or [fd00::1]:2379, with a port of 1 to 65535",
        "spec.discovery.etcd.endpoints[1]",
    ),
    InvalidObject(
        at("spec.discovery.etcd.endpoints", [f"etcd-{number}:2379" for number in range(17)]),
        "spec.discovery.etcd.endpoints: must have at most 16 entries, not [",
        "spec.discovery.etcd.endpoints",
    ),
    InvalidObject(
        at("spec.discovery.etcd.replicas", 2),
        "spec.discovery.etcd.replicas: must be 1 or 3, not 2; change it to that",
        "spec.discovery.etcd.replicas",
    ),
    InvalidObject(
        at("spec.discovery.etcd.tlsSecret", "tls"),
        "spec.discovery.etcd.tlsSecret: is for endpoints, and none are given; give endpoints, or "
        "leave tlsSecret out",
        "spec.discovery.etcd.tlsSecret",
    ),
    InvalidObject(
        at("spec.discovery.etcd", {"endpoints": ["etcd:2379"], "storage": {"size": "1Gi"}}),
        "spec.discovery.etcd.storage: is for an etcd that is run here, and endpoints are given; "
        "leave storage or endpoints out",
        "spec.discovery.etcd.storage",
    ),
    InvalidObject(
        at("spec.discovery.etcd.storage", {"size": "big"}),
        "spec.discovery.etcd.storage.size: 'big' is not an amount of memory; write bytes, or",
        "spec.discovery.etcd.storage.size",
    ),
    InvalidObject(
        at("spec.service.port", 70000),
        "spec.service.port: must be at most 65535, not 70000; lower it",
        "spec.service.port",
    ),
    InvalidObject(
        at("spec.service.type", "ExternalName"),
        "spec.service.type: must be 'ClusterIP', 'NodePort' or 'LoadBalancer', not 'ExternalName'",
        "spec.service.type",
    ),
    InvalidObject(
        at("spec.service.annotations", {"a": 1}),
        "spec.service.annotations.a: must be text, not 1; put it in quotes",
        "spec.service.annotations.a",
    ),
    InvalidObject(
        at("spec.service.apiKeySecret", "-keys"),
        "spec.service.apiKeySecret: '-keys' is not a name that Kubernetes takes",
        "spec.service.apiKeySecret",
    ),
    InvalidObject(
        at("spec.placement", {}),
        "spec.placement: says nothing; give domainLabel, minTransferGBps or both, or remove it",
        "spec.placement",
    ),
    InvalidObject(
        at("spec.placement", {"minTransferGBps": 0}),
        "spec.placement.minTransferGBps: must be more than 0, not 0; raise it",
        "spec.placement.minTransferGBps",
    ),
    InvalidObject(
        at("spec.placement", {"minTransferGBps": 20_000}),
        "spec.placement.minTransferGBps: must be at most 10000, not 20000; lower it",
        "spec.placement.minTransferGBps",
    ),
    InvalidObject(
        both(
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.placement", {"minTransferGBps": 1.5}),
        ),
        "spec.placement.minTransferGBps: mixed workers move no KV between pools; remove it",
        "spec.placement.minTransferGBps",
    ),
    InvalidObject(
        at("spec.rollout.gracePeriodSeconds", 9),
        "spec.rollout.gracePeriodSeconds: must be at least 10, not 9; raise it",
        "spec.rollout.gracePeriodSeconds",
    ),
    InvalidObject(
        at("spec.networkPolicy.enabled", 1),
        "spec.networkPolicy.enabled: must be true or false, not 1; write true or false",
        "spec.networkPolicy.enabled",
    ),
    InvalidObject(
        at("spec.model.name", 7),
        "spec.model.name: must be text, not 7; put it in quotes",
        "spec.model.name",
    ),
]
