"""Cases of the rules about a stock engine: (field, message, right, wrong)."""

from collections.abc import Callable

from tests.schema.object_cases import CPU, Change, at, both, sglang, vllm

Case = tuple[str, str, Change, Change]

MIXED = at("spec.roles", {"mixed": {"pools": [CPU]}})


def same(content: object) -> None:
    """Change nothing."""


OURS = (
    "a stock engine has none of device, transport, transferBandwidth, verifyTransfers, "
    "fenceTimeoutSeconds, batchInvariant, scheduler, schedulingPolicy, "
    "longPrefillTokenThreshold, chunkedPrefill, tbtSloMilliseconds, chunkSchedule, "
    "admissionWatermark, prefillDelayer, speculation: leave them out, or give its own flags in "
    "engine.args"
)
STOCK = (
    "engine.image, command, args, env, kvTransfer and allowUnknownVersion are for a stock engine: "
    "leave them out, or set engine.type: vllm"
)
WHOLE = (
    "engine.type is of the whole cluster, since KV moves between engines of one type: set it in "
    "spec.engine"
)
IMAGE = (
    "image is missing, and a stock engine needs it on Kubernetes: give one of its images, like "
    "vllm/vllm-openai:v0.32.0"
)
FLAG = (
    "PDCluster sets this flag, or cannot work with it: remove it, and give "
    "engine.dataParallelSize for --data-parallel-size"
)
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
    "or model.frontend: engine with type: vllm"
)
TWO_WORDS = "a flag and its value are two entries of the list, or one with = between them"
OF_ENGINE = at("spec.model.frontend", "engine")
VARIABLE = (
    "PDCluster sets this variable: remove it, and give engine.kvCacheMemory for "
    "VLLM_CPU_KVCACHE_SPACE"
)
VARIABLE_NAME = (
    "not a name of an environment variable: use letters, digits and '_', not starting with a digit"
)
CONNECTOR = (
    "not a connector that keeps what is promised of remote prefills: use NixlConnector, or leave "
    "it out (docs/engines.md)"
)
KEYS = (
    "a key that PDCluster sets or cannot work with: remove it, and give kvTransfer.backends for "
    "backends and kvTransfer.offload for connectors"
)
MEMORY = (
    "not an amount of memory: write bytes, or a number with Ki, Mi, Gi or Ti such as 512Mi; more "
    "than 0"
)
BACKENDS = (
    "engine.kvTransfer.backends is of the whole cluster, since both ends of a transfer have one "
    "transport: set it in spec.engine.kvTransfer"
)
UNMOVED = (
    "engine.kvTransfer means nothing beside mixed workers but for offload, since they move no KV: "
    "leave backends and extraConfig out"
)
ON_CPU = (
    "engine.kvTransfer.offload is for accelerators, since vLLM offloads from those alone, and gpu "
    "of a pool is cpu: leave it out"
)
STAGES = {
    "prefill": "fails every transfer from a worker of several stages",
    "decode": "frees a prompt's blocks once the first of several stages has read them",
}


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
        case(f"{engine}.args[]", TWO_WORDS, args("-v\n", "--seed=b c", "a b"), args("--seed 5")),
        case(
            f"{engine}.args",
            f"{engine.removeprefix('spec.')}.args {PARSES}",
            both(OF_ENGINE, args("-v", "--reasoning-parser", "qwen3")),
            args("--reasoning-pars=qwen3"),
        ),
        case(f"{engine}.env[].name", VARIABLE, variable("VLLM_PORTS"), variable("VLLM_DP_RANK")),
        case(f"{engine}.env[].name", VARIABLE_NAME, variable("_a1"), variable("A-B")),
        *_of_transfer(engine, case),
    ]


def _of_transfer(engine: str, case: Callable[..., Case]) -> list[Case]:
    """Those of fields of `kvTransfer`."""
    section = f"{engine}.kvTransfer"
    on_gpu = both(*(at(f"spec.roles.{role}.pools.0.gpu", "H100") for role in ("prefill", "decode")))
    if "mixed" in engine:
        on_gpu = at("spec.roles.mixed.pools.0.gpu", "H100")

    def offload(memory: str) -> Change:
        return both(on_gpu, at(f"{section}.offload", {"memory": memory}))

    def extra(key: str) -> Change:
        return at(f"{section}.extraConfig", {key: 1})

    cases = [
        case(
            f"{section}.connector",
            CONNECTOR,
            at(f"{section}.connector", "NixlConnector"),
            at(f"{section}.connector", "LMCacheConnectorV1"),
        ),
        case(f"{section}.offload.memory", MEMORY, offload("0.5Gi"), offload("0Gi")),
    ]
    right = same if "mixed" in engine else extra("num_threads")
    return [*cases, case(f"{section}.extraConfig", KEYS, right, extra("backends"))]


def role_cases(role: str, only: Change) -> list[Case]:
    """Those of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"
    whole = (own, WHOLE, both(only, vllm()), both(only, vllm(), at(f"{own}.engine.type", "vllm")))
    return [*_fields(f"{own}.engine", only), whole, *_of_role(role, only)]


def _of_role(role: str, only: Change) -> list[Case]:
    own = f"spec.roles.{role}"
    on_cpu = both(only, vllm(), at(f"{own}.engine.kvTransfer.offload", {"memory": "1Gi"}))
    on_gpu = both(on_cpu, at(f"{own}.pools.0.gpu", "H100"))

    return [
        (f"{own}.engine.kvTransfer.offload", f"roles.{role}.{ON_CPU}", on_gpu, on_cpu),
        (
            f"{own}.engine.kvTransfer.backends",
            f"roles.{role}.{BACKENDS}",
            both(only, vllm()) if role == "mixed" else vllm(kvTransfer={"backends": ["UCX"]}),
            both(only, vllm(), at(f"{own}.engine.kvTransfer.backends", ["UCX"])),
        ),
        *(
            (
                f"{own}.engine.pipelineParallelSize",
                f"roles.{role}.engine.pipelineParallelSize must be 1 with vllm, whose "
                f"NixlConnector {fate}: raise tensorParallelSize",
                both(vllm(), at(f"{own}.engine.pipelineParallelSize", 1)),
                both(vllm(), at(f"{own}.engine.pipelineParallelSize", 2)),
            )
            for name, fate in STAGES.items()
            if name == role
        ),
    ]


SQL = {"name": "sql", "path": "/sql"}
REPOSITORY, HUB = {"repo": "org/sql"}, "spec.model.adapters.0.huggingFace"
OF_HUB = {"name": "sql", "huggingFace": {**REPOSITORY}}
LOADED = at("spec.model.adapters", [SQL])

STOCK_CASES: list[Case] = [
    *_fields("spec.engine", same),
    (
        "spec.engine.type",
        "engine.type is sglang, which is for mixed workers: its decode side has to be called "
        "before a prefill begins, and here it is called with what the prefill answered: "
        "give roles.mixed in place of prefill and decode, or set type: vllm",
        both(MIXED, sglang()),
        sglang(),
    ),
    (
        "spec.engine.kvTransfer",
        UNMOVED,
        both(MIXED, vllm(kvTransfer={})),
        both(MIXED, vllm(kvTransfer={"extraConfig": {"num_threads": 4}})),
    ),
    (
        "spec.model.adapters",
        "model.adapters are for engine.type: vllm alone: set engine.type: vllm, or leave them out",
        both(vllm(), LOADED),
        LOADED,
    ),
    (
        "spec.model.adapters",
        "adapters must each have a name of their own, and not that of the model: rename one of "
        "them",
        both(vllm(), LOADED),
        both(vllm(), at("spec.model.adapters", [{**SQL, "name": "tiny"}])),
    ),
    (
        "spec.model.adapters",
        "path must begin with /, since relative paths without pvc are for pdctl alone: write the "
        "folder as the engine's container sees it",
        both(vllm(), LOADED),
        both(vllm(), at("spec.model.adapters", [{**SQL, "path": "sql"}])),
    ),
    *(
        (
            "spec.model.adapters[]",
            "needs either path or huggingFace, and not both: give the one that the adapter comes "
            "from",
            both(vllm(), at("spec.model.adapters", [OF_HUB])),
            both(vllm(), at("spec.model.adapters", [{"name": "sql", **sources}])),
        )
        for sources in ({}, {"path": "/sql", "huggingFace": REPOSITORY})
    ),
    *(
        (
            f"spec.model.adapters[].huggingFace.{field}",
            message,
            both(vllm(), at("spec.model.adapters", [OF_HUB])),
            both(vllm(), at("spec.model.adapters", [OF_HUB]), at(f"{HUB}.{field}", "A b")),
        )
        for field, message in (
            ("repo", "not a repository: write it like HuggingFaceTB/SmolLM2-135M-Instruct"),
            (
                "tokenSecret",
                "not a name that Kubernetes takes: use lower-case letters, digits, '-' and '.', "
                "starting and ending with a letter or digit",
            ),
        )
    ),
    (
        "spec.model.adapters[].name",
        "not a name of an adapter: use letters, digits, '.', '_', '/', ':' and '-'",
        both(vllm(), LOADED),
        both(vllm(), at("spec.model.adapters", [{**SQL, "name": "a b"}])),
    ),
    (
        "spec.model.frontend",
        "model.frontend is engine, which is for engine.type: vllm: leave it out, or set "
        "engine.type: vllm",
        both(vllm(), OF_ENGINE),
        both(MIXED, sglang(), OF_ENGINE),
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
