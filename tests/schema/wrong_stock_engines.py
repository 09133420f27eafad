"""PDClusters whose stock engine is wrong: (change, the model's fault, the API server's field)."""

from tests.schema.object_cases import Change, at, both, vllm

WRONG_STOCK_ENGINES: list[tuple[Change, str, str]] = [
    (
        at("spec.engine.type", "sglang"),
        "spec.engine.type: must be 'pdcluster' or 'vllm', not 'sglang'; change it to that",
        "spec.engine.type",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"type": "vllm"})),
        "spec.roles.decode.engine.type: is of the whole cluster, since KV moves between engines of "
        "one type; set it in spec.engine",
        "spec.roles.decode",
    ),
    (
        vllm(scheduler="continuous"),
        "spec.engine.scheduler: is not for vllm, which has no such setting; leave it out, or give "
        "vLLM's own flag in engine.args",
        "spec.engine",
    ),
    (
        both(vllm(), at("spec.roles.prefill.engine", {"prefillDelayer": {"enabled": False}})),
        "spec.roles.prefill.engine.prefillDelayer: is not for vllm, which has no such setting",
        "spec.roles.prefill",
    ),
    (
        at("spec.engine", {"args": ["--enforce-eager"]}),
        "spec.engine.args: is for a stock engine, not pdcluster; leave it out, or set type: vllm",
        "spec.engine",
    ),
    (
        at("spec.roles.decode.engine", {"env": [{"name": "A", "value": "b"}]}),
        "spec.roles.decode.engine.env: is for a stock engine, not pdcluster",
        "spec.roles.decode",
    ),
    (
        vllm(args=["--enforce-eager", "--served_model_name=x"]),
        "spec.engine.args[1]: --served-model-name is set by PDCluster; remove it",
        "spec.engine.args[1]",
    ),
    (
        vllm(args=["--kv-transfer-config.kv_role", "kv_both"]),
        "spec.engine.args[0]: --kv-transfer-config is set by PDCluster; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(dataParallelSize=2),
        "spec.engine.dataParallelSize: is not for vllm, of which a worker has one engine; leave it "
        "out, and give the pool more replicas",
        "spec.engine",
    ),
    (
        vllm(args=["--data-parallel-size=2"]),
        "spec.engine.args[0]: --data-parallel-size is not for a worker, which has one engine; "
        "remove it, and give the pool more replicas",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["-dp", "2"]),
        "spec.engine.args[0]: -dp is not for a worker, which has one engine; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["-tp", "2"]),
        "spec.engine.args[0]: -tp is the field tensorParallelSize of engine; set "
        "engine.tensorParallelSize in its place",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--disable_log_stat"]),
        "spec.engine.args[0]: --disable-log-stat may be short for --disable-log-stats, which is "
        "set by PDCluster; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--kv-tr.kv_role=kv_both"]),
        "spec.engine.args[0]: --kv-tr may be short for --kv-transfer-config, which is set by",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--max_model_le=64"]),
        "spec.engine.args[0]: --max-model-le may be short for --max-model-len, which is the field "
        "maxModelLen of engine; set engine.maxModelLen in its place",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--data-par", "2"]),
        "spec.engine.args[0]: --data-par may be short for --data-parallel-size, which is not for a "
        "worker, which has one engine; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--kv_offloading_size=8"]),
        "spec.engine.args[0]: --kv-offloading-size takes the place of the connector that moves KV "
        "between workers, and fails every remote prefill; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--kv-offloading-b", "native"]),
        "spec.engine.args[0]: --kv-offloading-b may be short for --kv-offloading-backend, which "
        "is for --kv-offloading-size, which is refused; remove it",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--reasoning-parser", "qwen3"]),
        "spec.engine.args: has --reasoning-parser, which leaves structured answers without their "
        "form until it sees the end of the reasoning, which PDCluster parses itself; set "
        "model.reasoningParser in its place, or model.frontend: engine",
        "spec.engine.args",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"args": ["--reasoning_parser=qwen3"]})),
        "spec.roles.decode.engine.args: has --reasoning-parser, which leaves structured answers",
        "spec.roles.decode.engine.args",
    ),
    (
        at("spec.model.frontend", "engine"),
        "spec.model.frontend: is engine, which is for a stock engine; leave it out, or set "
        "engine.type: vllm",
        "spec.model.frontend",
    ),
    *(
        (
            both(vllm(), at("spec.model.frontend", "engine"), at(f"spec.model.{field}", value)),
            f"spec.model.{field}: means nothing beside frontend: engine; give {flag} in "
            "engine.args, or leave frontend out",
            f"spec.model.{field}",
        )
        for field, value, flag in (
            ("chatTemplate", "chatml-tools", "--chat-template"),
            ("toolParser", "hermes", "--tool-call-parser"),
            ("reasoningParser", "qwen3", "--reasoning-parser"),
        )
    ),
    (
        vllm(args=["x" * 2049]),
        "spec.engine.args[0]: must have at most 2048 characters",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["-v"] * 65),
        "spec.engine.args: must have at most 64 entries",
        "spec.engine.args",
    ),
    (
        vllm(command=[]),
        "spec.engine.command: must have at least 1 entries, not []; add some, or leave it out",
        "spec.engine.command",
    ),
    (
        vllm(env=[{"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "1"}]),
        "spec.engine.env[0].name: VLLM_NIXL_SIDE_CHANNEL_PORT is set by PDCluster; remove it",
        "spec.engine.env[0].name",
    ),
    (
        vllm(env=[{"name": "POD_IP", "value": "10.0.0.1"}]),
        "spec.engine.env[0].name: POD_IP is set by PDCluster; remove it",
        "spec.engine.env[0].name",
    ),
    (
        vllm(env=[{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}]),
        "spec.engine.env[0].name: VLLM_CPU_KVCACHE_SPACE is set by PDCluster; set "
        "engine.kvCacheMemory in its place",
        "spec.engine.env[0].name",
    ),
    (
        vllm(env=[{"name": "1A", "value": ""}]),
        "spec.engine.env[0].name: '1A' is not a name of an environment variable; use letters",
        "spec.engine.env[0].name",
    ),
    (
        vllm(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "spec.engine.env: A is given twice; remove one of them",
        "spec.engine.env[1]",
    ),
    (
        vllm(env=[{"name": "A"}]),
        "spec.engine.env[0].value: is required; add it",
        "spec.engine.env[0].value",
    ),
]
