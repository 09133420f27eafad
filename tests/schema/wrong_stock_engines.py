"""PDClusters whose stock engine is wrong: (change, the model's fault, the API server's field, None
where that cannot say it).
"""

from tests.schema.object_cases import CPU, Change, at, both, sglang, vllm

MIXED = at("spec.roles", {"mixed": {"pools": [CPU]}})
_PAIRED = {**CPU, "gpu": "H200", "podsPerReplica": 2}
ON_GPU = at("spec.roles.decode.pools.0.gpu", "B200")


def _transfer(**given: object) -> Change:
    return vllm(kvTransfer=given)


WRONG_STOCK_ENGINES: list[tuple[Change, str, str | None]] = [
    (
        at("spec.engine.type", "trtllm"),
        "spec.engine.type: must be 'pdcluster', 'vllm' or 'sglang', not 'trtllm'; change it to "
        "that",
        "spec.engine.type",
    ),
    (
        sglang(),
        "spec.engine.type: is sglang, which is for mixed workers: its decode side has to be called "
        "before a prefill begins, and here it is called with what the prefill answered; give "
        "roles.mixed in place of prefill and decode, or set type: vllm",
        "spec.engine.type",
    ),
    (
        both(MIXED, sglang(kvTransfer={})),
        "spec.roles.mixed.engine.kvTransfer: is not for sglang, whose workers move no KV; leave "
        "it out",
        None,
    ),
    (
        both(MIXED, sglang(kvCacheMemory="1Gi")),
        "spec.roles.mixed.engine.kvCacheMemory: is not for sglang, which has no such bound; set "
        "numBlocks or deviceMemoryShare",
        None,
    ),
    (
        both(MIXED, sglang(dataParallelSize=2)),
        "spec.roles.mixed.engine.dataParallelSize: must be 1 with sglang, which has one engine a "
        "worker; give the pool more replicas",
        None,
    ),
    (
        both(
            at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H100", "podsPerReplica": 2}]}}),
            sglang(tensorParallelSize=3),
        ),
        "spec.roles.mixed.pools[0].podsPerReplica: 2 pods do not divide the 3 ranks of a worker "
        "(tensorParallelSize (3) times pipelineParallelSize (1)); give a number that does, or "
        "change the ranks",
        "spec.roles",
    ),
    *(
        (
            both(
                at(
                    "spec.roles",
                    {"mixed": {"pools": [{**CPU, "gpu": gpu, "podsPerReplica": pods}]}},
                ),
                vllm(tensorParallelSize=8 * pods),
            ),
            f"spec.roles.mixed.engine.tensorParallelSize: tensorParallelSize ({8 * pods}) times "
            f"pipelineParallelSize (1) is {8 * pods} ranks, over {most}; lower one of them",
            None,
        )
        for gpu, pods, most in (("GB200", 1, "the 4 of one pod"), ("GB300", 2, "4 in 2 pods"))
    ),
    (
        both(
            at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H100"}]}}),
            vllm(args=["--quantization", "nvfp4_per_token"]),
        ),
        "spec.roles.mixed.pools[0].gpu: is H100, without units for FP4, and --quantization "
        "nvfp4_per_token of vLLM computes in it alone; use B200 or another type with fp4Flops, or "
        "another --quantization",
        None,
    ),
    (
        both(MIXED, sglang(dataParallelSize=16)),
        "spec.roles.mixed.engine.dataParallelSize: must be 1 with sglang, which has one engine a",
        "spec.roles",
    ),
    (
        both(MIXED, sglang(tensorParallelSize=16)),
        "spec.roles.mixed.engine.tensorParallelSize: tensorParallelSize (16) times "
        "pipelineParallelSize (1) is 16 ranks, over the 8 of one pod; lower one of them, or give "
        "pools more podsPerReplica",
        "spec.roles",
    ),
    (
        both(
            at("spec.roles", {"mixed": {"pools": [{**CPU, "gpu": "H100", "gpusPerReplica": 16}]}}),
            sglang(),
        ),
        "spec.roles.mixed.pools[0].gpusPerReplica: must be at most 8, 8 in each pod, not 16; lower "
        "it, or raise podsPerReplica or gpusPerPod",
        "spec.roles",
    ),
    (
        both(MIXED, sglang(maxBatchedTokens=100)),
        "spec.roles.mixed.engine.maxBatchedTokens: is 100, which blockSize (16) does not divide, "
        "and SGLang ends with that; give a multiple of 16",
        None,
    ),
    (
        both(MIXED, sglang(blockSize=24)),
        "spec.roles.mixed.engine.blockSize: is 24, which does not divide SGLang's own "
        "maxBatchedTokens, a power of two; give a power of two, or maxBatchedTokens that is a "
        "multiple of 24",
        None,
    ),
    (
        both(MIXED, sglang(), at("spec.engine.image", "acme/sglang:v0.5.22-cu129")),
        "spec.engine.image: SGLang 0.5.22 is not known here; use 0.5.23, or set "
        "engine.allowUnknownVersion: true",
        None,
    ),
    *(
        (
            both(
                vllm(), at("spec.engine.image", image), at("spec.engine.allowUnknownVersion", True)
            ),
            "spec.engine.image: is an image of SGLang, and engine.type is vllm; give an image of "
            "vLLM, or set type: sglang",
            None,
        )
        for image in (
            *("lmsysorg/sglang:v0.5.23", "lmsysorg/sglang:latest", "reg:5000/sglang-rocm"),
            f"sglang@sha256:{'a' * 64}",
        )
    ),
    (
        both(vllm(), at("spec.roles.decode.engine.image", "lmsysorg/sglang:v0.5.20")),
        "spec.roles.decode.engine.image: is an image of SGLang, and engine.type is vllm; give an",
        None,
    ),
    (
        both(MIXED, sglang(), at("spec.engine.image", "vllm/vllm-openai-cpu:v0.32.0")),
        "spec.engine.image: is an image of vLLM, and engine.type is sglang; give an image of "
        "SGLang, or set type: vllm",
        None,
    ),
    *(
        (
            both(MIXED, sglang(env=[{"name": name, "value": "1"}])),
            f"spec.engine.env[0].name: {name} is set by PDCluster; remove it",
            None,
        )
        for name in (
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
            "SGLANG_MAX_NEW_TOKENS_LIMIT",
        )
    ),
    *(
        (
            vllm(env=[{"name": name, "value": "0"}]),
            f"spec.engine.env[0].name: {name} is set by PDCluster in each pod of a worker, by "
            "which its ranks find each other; remove it",
            None,
        )
        for name in (
            *("PDCLUSTER_WORKER", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE"),
        )
    ),
    (
        both(MIXED, sglang(batchInvariant=True)),
        "spec.engine.batchInvariant: is not for sglang, which has no such setting; leave it out, "
        "or give SGLang's own flag in engine.args",
        "spec.engine",
    ),
    (
        both(MIXED, sglang(kvCacheDtype="int8")),
        "spec.engine.kvCacheDtype: is not for sglang, which has no such setting; leave it out, "
        "or give SGLang's own flag in engine.args",
        "spec.engine",
    ),
    (
        both(MIXED, sglang(args=["--page-size=1"])),
        "spec.engine.args[0]: --page-size is the field blockSize of engine; set engine.blockSize "
        "in its place",
        None,
    ),
    (
        both(MIXED, sglang(args=["--disaggregation-b", "1"])),
        "spec.engine.args[0]: --disaggregation-b may be short for "
        "--disaggregation-bootstrap-port, which is set by PDCluster; remove it",
        None,
    ),
    (
        both(MIXED, sglang(args=["--disaggregation-mode", "decode"])),
        "spec.engine.args[0]: --disaggregation-mode is set by PDCluster; remove it",
        None,
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"type": "vllm"})),
        "spec.roles.decode.engine.type: is of the whole cluster, since KV moves between engines of "
        "one type; set it in spec.engine",
        "spec.roles.decode",
    ),
    (
        at("spec.engine", {"allowUnknownVersion": True}),
        "spec.engine.allowUnknownVersion: is for a stock engine, not pdcluster",
        "spec.engine",
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
        both(vllm(dataParallelSize=4), at("spec.roles.decode.engine", {"tensorParallelSize": 4})),
        "spec.roles.decode.engine.tensorParallelSize: tensorParallelSize (4) times "
        "pipelineParallelSize (1) times dataParallelSize (4) is 16 ranks, over the 8 of one "
        "pod; lower one of them",
        "spec.roles",
    ),
    (
        both(
            vllm(dataParallelSize=4),
            at("spec.roles.decode.pools.0.gpu", "H100"),
            at("spec.roles.decode.pools.0.gpusPerReplica", 2),
        ),
        "spec.roles.decode.pools[0].gpusPerReplica: must be at least 4, not 2: each rank has one "
        "(tensorParallelSize (1) times pipelineParallelSize (1) times dataParallelSize (4)); raise",
        "spec.roles",
    ),
    (
        both(
            vllm(dataParallelSize=3, tensorParallelSize=2),
            at("spec.roles.decode.pools.0.podsPerReplica", 2),
        ),
        "spec.roles.decode.pools[0].podsPerReplica: is 2, and dataParallelSize 3: a pod of vLLM's "
        "has whole data-parallel ranks, or a rank has whole pods; make one a multiple of the other",
        "spec.roles",
    ),
    (
        vllm(dataParallelSize=4, numBlocks=3),
        "spec.roles.prefill.engine.numBlocks: must be at least dataParallelSize (4), whose engines "
        "share them, not 3; raise numBlocks",
        "spec.roles.prefill.engine.numBlocks",
    ),
    (
        vllm(args=["--data-parallel-size=2"]),
        "spec.engine.args[0]: --data-parallel-size is set by PDCluster; set "
        "engine.dataParallelSize in its place",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["-dp", "2"]),
        "spec.engine.args[0]: -dp is set by PDCluster; set engine.dataParallelSize in its place",
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
    *(
        (
            vllm(args=[text]),
            f"spec.engine.args[0]: {text} is set by PDCluster; remove it",
            "spec.engine.args[0]",
        )
        for text in ("-n2", "-r1")
    ),
    (
        vllm(args=["--seed 5"]),
        "spec.engine.args[0]: '--seed 5' is one entry, which vLLM takes for one word; write --seed "
        "and its value as two entries of the list, or with = between them",
        "spec.engine.args[0]",
    ),
    (
        vllm(image="vllm/vllm-openai-cpu:v0.29.0"),
        "spec.engine.image: vLLM 0.29.0 is not known here; use 0.30 to 0.33, or set "
        "engine.allowUnknownVersion: true",
        None,
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"image": "a/vllm-openai:v0.34.0"})),
        "spec.roles.decode.engine.image: vLLM 0.34.0 is not known here; use 0.30 to 0.33, or",
        None,
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
        "spec.engine.args[0]: --data-par may be short for --data-parallel-size, which is set by "
        "PDCluster; set engine.dataParallelSize in its place",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--kv_offloading_size=8"]),
        "spec.engine.args[0]: --kv-offloading-size takes the place of the connector that moves KV "
        "between workers, and fails every remote prefill; set engine.kvTransfer.offload in its",
        "spec.engine.args[0]",
    ),
    (
        vllm(args=["--kv-offloading-b", "native"]),
        "spec.engine.args[0]: --kv-offloading-b may be short for --kv-offloading-backend, which "
        "is for --kv-offloading-size, which is refused; remove it",
        "spec.engine.args[0]",
    ),
    *(
        (vllm(args=[flag]), f"spec.engine.args[0]: {flag} {reason}", None)
        for flag, reason in (
            (
                "--enable-fault-tolerance",
                "needs a balancer outside vLLM, where PDCluster chooses the rank of each request; "
                "remove it: a worker that loses a rank is started again",
            ),
            (
                "--fault-tolerance-config",
                "turns on --enable-fault-tolerance, which is refused; remove it",
            ),
            (
                "--enable-elastic-ep",
                "changes the number of ranks while they serve, which the server process does not "
                "follow; remove it, and set engine.dataParallelSize",
            ),
            (
                "--prefill-context-parallel-size",
                "multiplies the ranks, for which pods ask for no accelerators; set "
                "engine.tensorParallelSize in its place",
            ),
            ("-pcp", "multiplies the ranks as --prefill-context-parallel-size does; remove it"),
            (
                "--enable-elastic",
                "may be short for --enable-elastic-ep, which changes the number of ranks while",
            ),
            (
                "--prefill-context",
                "may be short for --prefill-context-parallel-size, which multiplies the ranks,",
            ),
            ("-pc", "may be short for -pcp, which multiplies the ranks as"),
        )
    ),
    (
        vllm(args=["--lora-modules", "sql=/sql"]),
        "spec.engine.args[0]: --lora-modules names adapters that the server process does not "
        "know, so clients could not call them; set model.adapters in its place",
        "spec.engine.args[0]",
    ),
    (
        both(MIXED, sglang(), at("spec.model.adapters", [{"name": "sql", "path": "/sql"}])),
        "spec.model.adapters: are not for engine.type: sglang; set another engine.type, or leave "
        "them out",
        "spec.model.adapters",
    ),
    (
        both(vllm(), at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "1Gi"})),
        "spec.model.runtimeAdapters: is for our own engine, engine.type: pdcluster; leave it out, "
        "or set engine.type: pdcluster",
        "spec.model.runtimeAdapters",
    ),
    *(
        (
            both(vllm(), at("spec.model.adapters", [{"name": "sql", **sources}])),
            "spec.model.adapters[0]: needs either path or huggingFace, and not both; give the one "
            "that the adapter comes from",
            "spec.model.adapters[0]",
        )
        for sources in ({}, {"path": "/sql", "huggingFace": {"repo": "org/sql"}})
    ),
    (
        both(vllm(), at("spec.model.adapters", [{"name": "tiny", "path": "/sql"}])),
        "spec.model.adapters: must each have a name of their own, and not that of the model; "
        "rename one of them",
        "spec.model.adapters",
    ),
    (
        both(vllm(), at("spec.model.adapters", [{"name": "sql", "path": "/sql"}] * 2)),
        "spec.model.adapters: must each have a name of their own, and not that of the model; "
        "rename one of them",
        "spec.model.adapters[1]",
    ),
    (
        both(vllm(), at("spec.model.adapters", [{"name": "a b", "path": "/sql"}])),
        "spec.model.adapters[0].name: 'a b' is not a name of an adapter; use letters",
        "spec.model.adapters[0].name",
    ),
    (
        both(
            vllm(),
            at(
                "spec.model.adapters",
                [{"name": str(number), "path": "/sql"} for number in range(65)],
            ),
        ),
        "spec.model.adapters: must have at most 64",
        "spec.model.adapters",
    ),
    (
        vllm(args=["--reasoning-parser", "qwen3"]),
        "spec.engine.args: has --reasoning-parser, which leaves structured answers without their "
        "form until it sees the end of the reasoning, which PDCluster parses itself; set "
        "model.reasoningParser in its place, or model.frontend: engine with type: vllm",
        "spec.engine.args",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"args": ["--reasoning_pars=qwen3"]})),
        "spec.roles.decode.engine.args: has --reasoning-parser, which leaves structured answers",
        "spec.roles.decode.engine.args",
    ),
    (
        at("spec.model.frontend", "engine"),
        "spec.model.frontend: is engine, which is for engine.type: vllm; leave it out, or set "
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
        vllm(env=[{"name": "A", "value": "", "from": {}}]),
        "spec.engine.env[0].from: unknown field; known here: name, value",
        None,
    ),
    (
        vllm(env=[{"name": "A"}]),
        "spec.engine.env[0].value: is required; add it",
        "spec.engine.env[0].value",
    ),
    (
        vllm(kvTiers=[{"type": "host", "size": "1Gi"}]),
        "spec.engine.kvTiers: is not for vllm, which has no such setting; set engine.kvTransfer."
        "offload in its place",
        "spec.engine",
    ),
    (
        at("spec.engine", {"kvTransfer": {}}),
        "spec.engine.kvTransfer: is for a stock engine, not pdcluster; leave it out, or set type",
        "spec.engine",
    ),
    *(
        (
            _transfer(connector=name),
            f"spec.engine.kvTransfer.connector: {name} {reason}; use NixlConnector, or leave it",
            "spec.engine.kvTransfer.connector",
        )
        for name, reason in (
            (
                "MooncakeConnector",
                "begins both legs of a request at once, by a transfer id, and keeps a prompt's KV "
                "for 480 s where its decode worker is lost",
            ),
            (
                "NixlPushConnector",
                "holds the blocks of a request that ended until its prefill worker has written "
                "them, and for good where that one is lost",
            ),
            (
                "LMCacheConnectorV1",
                "gives a decode worker no handle of the KV that a prefill worker keeps for it, "
                "and computes what its store lacks without saying so",
            ),
            ("MultiConnector", "is what PDCluster sets for kvTransfer.offload"),
            (
                "HF3FSKVConnector",
                "gives a decode worker no handle of the KV that a prefill worker keeps for it",
            ),
        )
    ),
    (
        _transfer(backends=["UCX", "GDS"]),
        "spec.engine.kvTransfer.backends[1]: must be 'UCX' or 'LIBFABRIC', not 'GDS'",
        "spec.engine.kvTransfer.backends[1]",
    ),
    (
        _transfer(backends=["EFA"]),
        "spec.engine.kvTransfer.backends[0]: must be 'UCX' or 'LIBFABRIC', not 'EFA'",
        "spec.engine.kvTransfer.backends[0]",
    ),
    (
        _transfer(backends=[]),
        "spec.engine.kvTransfer.backends: must have at least 1 entries, not []",
        "spec.engine.kvTransfer.backends",
    ),
    (
        _transfer(backends=["UCX", "UCX"]),
        "spec.engine.kvTransfer.backends: UCX is given twice; remove one of them",
        "spec.engine.kvTransfer.backends[1]",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"kvTransfer": {"backends": ["LIBFABRIC"]}})),
        "spec.roles.decode.engine.kvTransfer.backends: is of the whole cluster, since both ends of "
        "a transfer have one transport; set it in spec.engine.kvTransfer",
        "spec.roles.decode.engine.kvTransfer.backends",
    ),
    *(
        (
            _transfer(extraConfig={key: 1}),
            f"spec.engine.kvTransfer.extraConfig: {message}",
            "spec.engine.kvTransfer.extraConfig",
        )
        for key, message in (
            ("backends", "backends is a field; set kvTransfer.backends in its place"),
            (
                "connectors",
                "connectors is set by PDCluster; set kvTransfer.offload in its place",
            ),
            (
                "enforce_handshake_compat",
                "enforce_handshake_compat lets engines read KV that they hold in different forms; "
                "remove it, and give both roles the same --attention-backend in engine.args",
            ),
            (
                "bidirectional_kv_xfer",
                "bidirectional_kv_xfer keeps the KV of each answer for 480 s, and no prefill "
                "worker fetches it; remove it",
            ),
            *(
                (
                    key,
                    f"{key} is no key of NIXL's that means something here; use num_threads, "
                    "kv_lease_duration, engine_ttl, or remove it",
                )
                for key in ("Threads", "kv_leas_duration", "decoder_kv_blocks_ttl")
            ),
        )
    ),
    (
        _transfer(extraConfig={f"a{number}": 1 for number in range(17)}),
        "spec.engine.kvTransfer.extraConfig: must have at most 16 entries",
        "spec.engine.kvTransfer.extraConfig",
    ),
    (
        _transfer(extraConfig={"kv_lease_duration": 29}),
        "spec.engine.kvTransfer.extraConfig: kv_lease_duration is 29, and a decode worker may read "
        "KV for 30 s; give 30 or more, or leave it out",
        None,
    ),
    (
        both(
            _transfer(backends=["LIBFABRIC", "UCX"]),
            at("spec.roles.decode.engine.kvTransfer", {"extraConfig": {"num_threads": 4}}),
        ),
        "spec.roles.decode.engine.kvTransfer.extraConfig: has num_threads, which vLLM reads with "
        "UCX alone, and backends has another; leave num_threads out",
        None,
    ),
    (
        _transfer(extraConfig={"num_threads": "4"}),
        "spec.engine.kvTransfer.extraConfig.num_threads: must be a whole number, not '4'",
        "spec.engine.kvTransfer.extraConfig.num_threads",
    ),
    (
        _transfer(offload={}),
        "spec.engine.kvTransfer.offload.memory: is required; add it",
        "spec.engine.kvTransfer.offload.memory",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"kvTransfer": {"offload": {"memory": 1}}})),
        "spec.roles.decode.engine.kvTransfer.offload: is for accelerators, since vLLM offloads "
        "from those alone, and gpu of a pool is cpu; leave it out",
        "spec.roles.decode.engine.kvTransfer.offload",
    ),
    (
        both(
            ON_GPU,
            vllm(),
            at("spec.roles.decode.engine", {"kvTransfer": {"offload": {"memory": "200Gi"}}}),
            at("spec.roles.decode.resources", {"limits": {"memory": "200Gi"}}),
        ),
        "spec.roles.decode.resources.limits.memory: must be more than the 214748364800 bytes of "
        "engine.kvTransfer.offload, which count to it, not 200Gi; raise the limit, or lower",
        None,
    ),
    (
        both(
            ON_GPU,
            vllm(),
            at("spec.roles.decode.engine", {"kvTransfer": {"offload": {"memory": "200Gi"}}}),
            at("spec.roles.decode.sharedMemory", "64Gi"),
        ),
        "spec.roles.decode.sharedMemory: must be more than the 214748364800 bytes of "
        "engine.kvTransfer.offload, which are in it, not 68719476736; raise it, or leave it out",
        None,
    ),
    (
        both(
            at("spec.roles", {"mixed": {"pools": [_PAIRED, {**_PAIRED, "name": "b"}]}}),
            vllm(dataParallelSize=16, kvTransfer={"offload": {"memory": "200Gi"}}),
            at("spec.roles.mixed.resources", {"limits": {"memory": "100Gi"}}),
        ),
        "spec.roles.mixed.resources.limits.memory: must be more than the 107374182400 bytes of "
        "engine.kvTransfer.offload in each of 2 pods, which count to it, not 100Gi; raise",
        None,
    ),
    (
        both(MIXED, _transfer(backends=["UCX"])),
        "spec.engine.kvTransfer: means nothing beside mixed workers but for offload, since they "
        "move no KV; leave backends and extraConfig out",
        "spec.engine.kvTransfer",
    ),
    (
        both(vllm(), at("spec.roles.prefill.engine", {"pipelineParallelSize": 2})),
        "spec.roles.prefill.engine.pipelineParallelSize: must be 1 with vllm, whose NixlConnector "
        "fails every transfer from a worker of several stages; raise tensorParallelSize",
        "spec.roles.prefill.engine.pipelineParallelSize",
    ),
    (
        both(vllm(), at("spec.roles.decode.engine", {"pipelineParallelSize": 2})),
        "spec.roles.decode.engine.pipelineParallelSize: must be 1 with vllm, whose NixlConnector "
        "frees a prompt's blocks once the first of several stages has read them; raise",
        "spec.roles.decode.engine.pipelineParallelSize",
    ),
    *(
        (
            both(vllm(args=spec), at("spec.roles.decode.engine.args", decode)),
            f"spec.roles.decode.engine.args: {reason} for prefill, and vLLM {effect}; give both "
            "roles the same, in spec.engine.args",
            None,
        )
        for spec, decode, reason, *others in (
            ([], ["--kv-cache-dtype", "fp8"], "--kv-cache-dtype is fp8 for decode and auto"),
            (
                ["--kv_cache_dtype=fp8"],
                ["--kv-cache-dtype=auto"],
                "--kv-cache-dtype is auto for decode and fp8",
            ),
            (
                ["--attention-backend", "FLASH_ATTN"],
                ["--attention-backend=flashinfer"],
                "--attention-backend is FLASHINFER for decode and FLASH_ATTN",
            ),
            (
                [],
                ["--disable-hybrid-kv-cache-manager"],
                "--disable-hybrid-kv-cache-manager is true for decode and false",
            ),
            (
                [],
                ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'],
                '--speculative-config is {"method": "mtp"} for decode and none',
            ),
            (
                ["-sc", '{"method":"eagle3","model":"/a"}'],
                ["--spec-model=/b", "-sc.method", "eagle3"],
                '--speculative-config is {"method": "eagle3", "model": "/b"} for decode and '
                '{"method": "eagle3", "model": "/a"}',
            ),
            (
                ["--attention-b", "FLASH_ATTN"],
                ["--attention-backend=flashinfer"],
                "--attention-backend is FLASHINFER for decode and FLASH_ATTN",
            ),
            (
                [],
                ["--disable_h"],
                "--disable-hybrid-kv-cache-manager is true for decode and false",
            ),
            (
                [],
                ["--spec-me", "mtp"],
                '--speculative-config is {"method": "mtp"} for decode and none',
            ),
            (
                [],
                ["--specu.method=mtp"],
                '--speculative-config is {"method": "mtp"} for decode and none',
            ),
            (
                [],
                ['--hf-overrid={"a":2}'],
                '--hf-overrides is {"a": 2} for decode and {}',
                "does not compare it, and would decode from KV of another model",
            ),
            *(
                (*case, "does not compare it, and would decode from KV of another model")
                for case in (
                    ([], ["-q", "fp8"], "--quantization is fp8 for decode and none"),
                    (
                        ["--quantization=fp8"],
                        ["-q=awq"],
                        "--quantization is awq for decode and fp8",
                    ),
                    (
                        [],
                        ["--quantization-config.a=1"],
                        '--quantization-config is {"a": 1} for decode and {}',
                    ),
                    (
                        ["--load-format=dummy"],
                        ["--loa", "safetensors"],
                        "--load-format is safetensors for decode and dummy",
                    ),
                )
            ),
            (
                ["--hf-overrides.a", "1"],
                ['--hf-overrides={"a":2}'],
                '--hf-overrides is {"a": 2} for decode and {"a": 1}',
                "does not compare it, and would decode from KV of another model",
            ),
            (
                ['--hf-overrides={"a":1}', "--hf-overrides.b.c", "x"],
                ["--hf-overrides.b.c", "y", "--hf-overrides.b.d=true"],
                '--hf-overrides is {"b": {"c": "y", "d": true}} for decode and {"b": {"c": "x"}}',
                "does not compare it, and would decode from KV of another model",
            ),
        )
        for effect in others or ("refuses every transfer between the two",)
    ),
]
