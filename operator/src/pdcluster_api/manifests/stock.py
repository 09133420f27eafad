"""Command line and environment of a stock engine by its type, and those of SGLang."""

from pdcluster_api.manifests.vllm import (
    DEFAULT_COMMAND,
    LOOPBACK,
    VllmSettings,
    flags_of_fields,
    json_text,
    pods_of,
    vllm_command,
    vllm_environment,
)
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import MASTER_PORT
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.stock_engine import SGLANG, VLLM

DEFAULT_COMMANDS = {VLLM: DEFAULT_COMMAND, SGLANG: ("python3", "-m", "sglang.launch_server")}

_FLAGS = {
    "max_model_len": "--context-length",
    "max_sequences": "--max-running-requests",
    "max_batched_tokens": "--chunked-prefill-size",
    "device_memory_share": "--mem-fraction-static",
    "tensor_parallel_size": "--tp-size",
    "pipeline_parallel_size": "--pp-size",
}

# As vLLM's, of which Kubernetes puts the pod's own variables in
_OVER_PODS = (
    "--nnodes {} --node-rank $(LWS_WORKER_INDEX) "
    f"--dist-init-addr $(LWS_LEADER_ADDRESS):{MASTER_PORT}"
)

_CPU_BLOCKS = 1024  # by default SGLang takes a share of a machine's memory


def stock_command(
    cluster: PDCluster, pool: PoolSpec, engine: EngineSpec, model_path: str, site: VllmSettings
) -> list[str]:
    """The whole command line.  engine: of the role of the pool."""
    command = _sglang_command if engine.type == SGLANG else vllm_command
    return command(cluster, pool, engine, model_path, site)


def stock_environment(
    pool: PoolSpec, engine: EngineSpec, site: VllmSettings, startup_seconds: int
) -> dict[str, str]:
    """startup_seconds: of the role."""
    if engine.type != SGLANG:
        return vllm_environment(pool, engine, site, startup_seconds)
    return {
        "HF_HUB_OFFLINE": "1",
        **({"OMP_NUM_THREADS": str(engine.threads)} if engine.threads else {}),
        **{each.name: each.value for each in engine.env or ()},
        # /health says whether it serves; with this it would compute a token and wait a second
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "true",  # before temperature, as our engine and vLLM
    }


def _sglang_command(
    cluster: PDCluster, pool: PoolSpec, engine: EngineSpec, model_path: str, site: VllmSettings
) -> list[str]:
    ours = {
        **flags_of_fields(engine, _FLAGS),
        "--page-size": engine.block_size,
        "--dtype": cluster.spec.model.dtype,
        "--served-model-name": cluster.spec.model.name,
        "--host": LOOPBACK,
        "--port": site.http,
        "--schedule-policy": "fcfs",  # the one beside which it orders by priority
        "--sampling-defaults": "openai",  # what a request leaves out is neutral, as in our engine
        "--kv-events-config": json_text(
            publisher="zmq", endpoint=f"tcp://{LOOPBACK}:{site.kv_events}", topic=""
        ),
    }
    on_cpu = pool.gpu == NO_ACCELERATOR
    num_blocks = engine.num_blocks
    if num_blocks is None and on_cpu and engine.device_memory_share is None:
        num_blocks = _CPU_BLOCKS
    if num_blocks is not None:
        ours["--max-total-tokens"] = num_blocks * engine.block_size
    if on_cpu:
        ours["--device"] = "cpu"
    pods = pods_of(engine, pool, site)
    return [
        *(engine.command or DEFAULT_COMMANDS[SGLANG]),
        *("--log-level-http", "warning"),
        *(engine.args or ()),
        *("--model-path", model_path),
        *(() if engine.prefix_caching else ("--disable-radix-cache",)),
        "--incremental-streaming-output",
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        *(text for flag, value in ours.items() for text in (flag, str(value))),
        *(_OVER_PODS.format(pods).split() if pods > 1 else ()),
    ]
