"""Cases of the rules about a stock engine: (field, message, right, wrong)."""

from tests.schema.object_cases import Change, at, both, vllm

Case = tuple[str, str, Change, Change]

OURS = (
    "engine.type: vllm has none of device, dataParallelSize, transport, transferBandwidth, "
    "verifyTransfers, fenceTimeoutSeconds, batchInvariant, scheduler, schedulingPolicy, "
    "longPrefillTokenThreshold, chunkedPrefill, tbtSloMilliseconds, chunkSchedule, "
    "admissionWatermark, prefillDelayer, speculation: leave them out, or give vLLM's own flags in "
    "engine.args, and more replicas in place of dataParallelSize"
)
STOCK = (
    "engine.image, command, args and env are for a stock engine: leave them out, or set "
    "engine.type: vllm"
)
WHOLE = (
    "engine.type is of the whole cluster, since KV moves between engines of one type: set it in "
    "spec.engine"
)
IMAGE = (
    "image is missing, and engine.type: vllm needs it on Kubernetes: give a stock image, like "
    "vllm/vllm-openai:v0.32.0"
)
FLAG = "PDCluster sets this flag, or cannot work with it: remove it"
FIELD = (
    "this flag is a field of engine: set maxModelLen, maxSequences, maxBatchedTokens, blockSize, "
    "prefixCaching, kvCacheMemory, deviceMemoryShare, numBlocks, tensorParallelSize or "
    "pipelineParallelSize in its place"
)
SHORT = (
    "vLLM may take this for a longer flag, which is refused: remove it, or set the field that "
    "stands for it"
)
PARSES = (
    "has --reasoning-parser, which leaves structured answers without their form until it sees the "
    "end of the reasoning, which PDCluster parses itself: set model.reasoningParser in its place, "
    "or model.frontend: engine"
)
OF_ENGINE = at("spec.model.frontend", "engine")
VARIABLE = (
    "PDCluster sets this variable: remove it, and give engine.kvCacheMemory for "
    "VLLM_CPU_KVCACHE_SPACE"
)
VARIABLE_NAME = (
    "not a name of an environment variable: use letters, digits and '_', not starting with a digit"
)


def _fields(engine: str, only: Change) -> list[Case]:
    """Rules of one section `engine`, which is there after `only`."""
    whole = engine.removesuffix(".engine") if engine.startswith("spec.roles") else engine

    def case(field: str, message: str, right: Change, wrong: Change) -> Case:
        return field, message, both(only, vllm(), right), both(only, vllm(), wrong)

    def args(*values: str) -> Change:
        return at(f"{engine}.args", list(values))

    def variable(name: str) -> Change:
        return at(f"{engine}.env", [{"name": name, "value": "1"}])

    return [
        case(
            whole,
            OURS,
            both(at(f"{engine}.kvCacheMemory", "1Gi"), at(f"{engine}.threads", 2)),
            at(f"{engine}.speculation", {"method": "Off"}),
        ),
        (
            whole,
            STOCK,
            both(only, vllm(), at(f"{engine}.image", "vllm:1")),
            both(only, at(f"{engine}.image", "vllm:1")),
        ),
        case(f"{engine}.args[]", FLAG, args("--portable", "--seed=--port"), args("--host=x")),
        case(f"{engine}.args[]", FIELD, args("--block-sizes", "-tpu"), args("-v", "--block_size")),
        case(
            f"{engine}.args[]",
            SHORT,
            args("-v", "--", "--reasoning-parser-plugin"),
            args("--api_ke=x"),
        ),
        case(
            f"{engine}.args",
            f"{engine.removeprefix('spec.')}.args {PARSES}",
            both(OF_ENGINE, args("-v", "--reasoning-parser", "qwen3")),
            args("--reasoning_parser=qwen3"),
        ),
        case(f"{engine}.env[].name", VARIABLE, variable("VLLM_PORTS"), variable("VLLM_DP_RANK")),
        case(f"{engine}.env[].name", VARIABLE_NAME, variable("_a1"), variable("A-B")),
    ]


def role_cases(role: str, only: Change) -> list[Case]:
    """Those of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"
    whole = (own, WHOLE, both(only, vllm()), both(only, vllm(), at(f"{own}.engine.type", "vllm")))
    return [*_fields(f"{own}.engine", only), whole]


STOCK_CASES: list[Case] = [
    *_fields("spec.engine", lambda content: None),
    (
        "spec.model.frontend",
        "model.frontend is engine, which is for a stock engine: leave it out, or set "
        "engine.type: vllm",
        both(vllm(), OF_ENGINE),
        OF_ENGINE,
    ),
    *(
        (
            f"spec.model.{field}",
            f"{field} means nothing beside frontend: engine: give {flag} in engine.args, or leave "
            "frontend out",
            both(vllm(), at(f"spec.model.{field}", value)),
            both(vllm(), OF_ENGINE, at(f"spec.model.{field}", value)),
        )
        for field, value, flag in (
            ("chatTemplate", "chatml-tools", "--chat-template"),
            ("toolParser", "hermes", "--tool-call-parser"),
            ("reasoningParser", "none", "--reasoning-parser"),
        )
    ),
    (
        "spec.engine",
        IMAGE,
        both(
            at("spec.engine", {"type": "vllm"}),
            at("spec.roles.prefill.engine", {"image": "a"}),
            at("spec.roles.decode.engine", {"image": "b"}),
        ),
        both(at("spec.engine", {"type": "vllm"}), at("spec.roles.decode.engine", {"image": "b"})),
    ),
]
