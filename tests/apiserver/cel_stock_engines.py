"""Cases of the rules about a stock engine."""

from collections.abc import Callable

from tests.apiserver.cel_scheduling import Case
from tests.schema.object_cases import CPU, Change, at, both, sglang, vllm

MIXED = at("spec.roles", {"mixed": {"pools": [CPU]}})


def same(content: object) -> None:
    """Change nothing."""


OF_ENGINE = at("spec.model.frontend", "engine")


def _fields(engine: str, only: Change) -> list[Case]:
    """Rules of one section `engine`, which is there after `only`."""

    def case(right: Change, wrong: Change) -> Case:
        return both(only, vllm(), right), both(only, vllm(), wrong)

    def args(*values: str) -> Change:
        return at(f"{engine}.args", list(values))

    def variable(name: str) -> Change:
        return at(f"{engine}.env", [{"name": name, "value": "1"}])

    return [
        case(
            both(at(f"{engine}.kvCacheMemory", "1Gi"), at(f"{engine}.threads", 2)),
            at(f"{engine}.speculation", {"method": "Off"}),
        ),
        (
            both(only, vllm(), at(f"{engine}.image", "vllm:1")),
            both(only, at(f"{engine}.image", "vllm:1")),
        ),
        case(args("--portable", "--seed=--port"), args("--host=x")),
        case(args("--block-sizes", "-tpu"), args("-v", "--block_size")),
        case(args("-v", "--", "--reasoning-parser-plugin"), args("--api_ke=x")),
        case(args("-v\n", "--seed=b c", "a b"), args("--seed 5")),
        case(
            both(OF_ENGINE, args("-v", "--reasoning-parser", "qwen3")),
            args("--reasoning-pars=qwen3"),
        ),
        case(variable("VLLM_PORTS"), variable("VLLM_DP_RANK")),
        case(variable("_a1"), variable("A-B")),
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
            at(f"{section}.connector", "NixlConnector"),
            at(f"{section}.connector", "LMCacheConnectorV1"),
        ),
        case(offload("0.5Gi"), offload("0Gi")),
    ]
    right = same if "mixed" in engine else extra("num_threads")
    return [*cases, case(right, extra("backends"))]


def role_cases(role: str, only: Change) -> list[Case]:
    """Those of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"
    whole = (both(only, vllm()), both(only, vllm(), at(f"{own}.engine.type", "vllm")))
    return [*_fields(f"{own}.engine", only), whole, *_of_role(role, only)]


def _of_role(role: str, only: Change) -> list[Case]:
    own = f"spec.roles.{role}"
    on_cpu = both(only, vllm(), at(f"{own}.engine.kvTransfer.offload", {"memory": "1Gi"}))
    on_gpu = both(on_cpu, at(f"{own}.pools.0.gpu", "H100"))

    return [
        (on_gpu, on_cpu),
        (
            both(only, vllm()) if role == "mixed" else vllm(kvTransfer={"backends": ["UCX"]}),
            both(only, vllm(), at(f"{own}.engine.kvTransfer.backends", ["UCX"])),
        ),
        *(
            (
                both(vllm(), at(f"{own}.engine.pipelineParallelSize", 1)),
                both(vllm(), at(f"{own}.engine.pipelineParallelSize", 2)),
            )
            for name in ("prefill", "decode")
            if name == role
        ),
    ]


SQL = {"name": "sql", "path": "/sql"}
REPOSITORY, HUB = {"repo": "org/sql"}, "spec.model.adapters.0.huggingFace"
OF_HUB = {"name": "sql", "huggingFace": {**REPOSITORY}}
LOADED = at("spec.model.adapters", [SQL])

ALLOWED = at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "1Gi"})

STOCK_CASES: list[Case] = [
    (ALLOWED, both(vllm(), ALLOWED)),
    (ALLOWED, both(ALLOWED, at("spec.model.runtimeAdapters.path", "lora"))),
    (ALLOWED, both(ALLOWED, at("spec.model.runtimeAdapters.memory", "0"))),
    (
        both(ALLOWED, at("spec.model.runtimeAdapters.path", "/...//.a/..b/a.b/")),
        both(ALLOWED, at("spec.model.runtimeAdapters.path", "/lora/../..")),
    ),
    *(
        (ALLOWED, both(ALLOWED, at(f"spec.{place}.{size}", 2)))
        for place in ("engine", "roles.prefill.engine")
        for size in ("tensorParallelSize", "pipelineParallelSize", "dataParallelSize")
    ),
    *_fields("spec.engine", same),
    (both(MIXED, sglang()), sglang()),
    (
        both(MIXED, vllm(kvTransfer={})),
        both(MIXED, vllm(kvTransfer={"extraConfig": {"num_threads": 4}})),
    ),
    (LOADED, both(MIXED, sglang(), LOADED)),
    (both(vllm(), LOADED), both(vllm(), at("spec.model.adapters", [{**SQL, "name": "tiny"}]))),
    (both(vllm(), LOADED), both(vllm(), at("spec.model.adapters", [{**SQL, "path": "sql"}]))),
    *(
        (
            both(vllm(), at("spec.model.adapters", [OF_HUB])),
            both(vllm(), at("spec.model.adapters", [{"name": "sql", **sources}])),
        )
        for sources in ({}, {"path": "/sql", "huggingFace": REPOSITORY})
    ),
    *(
        (
            both(vllm(), at("spec.model.adapters", [OF_HUB])),
            both(vllm(), at("spec.model.adapters", [OF_HUB]), at(f"{HUB}.{field}", "A b")),
        )
        for field in ("repo", "tokenSecret")
    ),
    (both(vllm(), LOADED), both(vllm(), at("spec.model.adapters", [{**SQL, "name": "a b"}]))),
    (both(vllm(), OF_ENGINE), both(MIXED, sglang(), OF_ENGINE)),
    *(
        (
            both(vllm(), at(f"spec.model.{field}", value)),
            both(vllm(), OF_ENGINE, at(f"spec.model.{field}", value)),
        )
        for field, value in (
            ("chatTemplate", "chatml-tools"),
            ("toolParser", "hermes"),
            ("reasoningParser", "none"),
        )
    ),
    (
        both(
            at("spec.engine", {"type": "vllm"}),
            at("spec.roles.prefill.engine", {"image": "a"}),
            at("spec.roles.decode.engine", {"image": "b"}),
        ),
        both(at("spec.engine", {"type": "vllm"}), at("spec.roles.decode.engine", {"image": "b"})),
    ),
]
