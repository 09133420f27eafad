"""A stock vLLM's command line, environment and container. What PDCluster sets comes after the
user's own flags, since the last of two counts. The container is a native sidecar, so that it
outlives the server process, whose streams need it (docs/design/stock-engine.md).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdcluster_api.manifests.model_source import adapter_path
from pdcluster_api.manifests.objects import (
    ENGINE_FOLDER,
    LOGGING_FILE,
    Manifest,
    container_security,
    field_variables,
)
from pdcluster_api.manifests.vllm_connectors import kv_transfer_config
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.engine_rules import pods_per_replica
from pdcluster_schema.model import ModelSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import HTTP_PORT, MASTER_PORT
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.stock_engine import VLLM
from pdcluster_schema.vllm_flags import flags_of

DEFAULT_COMMAND = ("vllm", "serve")
LOOPBACK = "127.0.0.1"
MAX_LOGPROBS = 21  # One more than a client may ask for: the chosen token is asked for as well

# The end of this file becomes the message of the container's end
TERMINATION_LOG = "/dev/termination-log"

# Fields that are passed on where they are given; vLLM's own defaults follow the device
_FLAGS = {
    "max_model_len": "--max-model-len",
    "max_sequences": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "device_memory_share": "--gpu-memory-utilization",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "data_parallel_size": "--data-parallel-size",
}


# Flags for ranks in several pods: the executor's own processes, without Ray. Kubernetes puts the
# pod's own variables in, and vLLM takes from the node's rank which data-parallel ranks are there.
_OVER_PODS = (
    "--nnodes {} --node-rank $(LWS_WORKER_INDEX) --master-addr $(LWS_LEADER_ADDRESS) "
    f"--master-port {MASTER_PORT}"
)


@dataclass(frozen=True)
class VllmSettings:
    """Listeners of a stock engine."""

    address: str = LOOPBACK
    leader: str = LOOPBACK  # of a worker of several pods: where the events of its ranks go
    http: int = 8100  # of this worker's server process alone, on loopback
    # of the first rank, the others in a row behind it
    kv_events: int = 8101
    side_channel: int = 8200  # where engines of other workers ask for KV blocks, at `address`
    # started by the worker's server process; otherwise in a container of its own
    is_process: bool = False


# Listeners in a pod, whose address the kubelet puts in
IN_CONTAINER = VllmSettings(address="$(POD_IP)", leader="$(LWS_LEADER_ADDRESS)")


def vllm_command(
    cluster: PDCluster, pool: PoolSpec, engine: EngineSpec, model_path: str, site: VllmSettings
) -> list[str]:
    """The whole command line.  engine: of the role of the pool."""
    model = cluster.spec.model
    pods = pods_of(engine, pool, site)
    events_host = site.leader if pods > 1 and engine.data_parallel_size > 1 else LOOPBACK
    ours = {
        **flags_of_fields(engine, _FLAGS),
        "--dtype": model.dtype,
        "--served-model-name": model.name,
        "--host": LOOPBACK,
        "--port": site.http,
        "--scheduling-policy": "priority",
        "--generation-config": "vllm",  # what a request leaves out is neutral, as in our engine
        "--max-logprobs": MAX_LOGPROBS,
        "--kv-events-config": json_text(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://{events_host}:{site.kv_events}",
            topic="",
        ),
    }
    on_cpu = pool.gpu == NO_ACCELERATOR
    if on_cpu or "kv_cache_memory" in engine.model_fields_set:
        # by default vLLM takes nearly all memory of a machine without an accelerator
        ours["--kv-cache-memory-bytes"] = _share(engine.kv_cache_memory, engine, pods)
    if engine.num_blocks:
        ours["--num-gpu-blocks-override"] = _share(engine.num_blocks, engine, pods)
    moves_kv = cluster.spec.roles.mixed is None
    transfer = kv_transfer_config(engine, on_cpu=on_cpu, moves_kv=moves_kv)
    if transfer is not None:
        ours["--kv-transfer-config"] = json_text(**transfer)
    if engine.data_parallel_size > 1:
        # numbers of several HTTP servers have no time of start, by which a restart is seen
        ours["--api-server-count"] = 1
    return [
        *(engine.command or DEFAULT_COMMAND),
        model_path,
        *(engine.args or ()),
        *_caching(engine),
        *_adapters(cluster.spec.model, engine.args or ()),
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *(text for flag, value in ours.items() for text in (flag, str(value))),
        *(_OVER_PODS.format(pods).split() if pods > 1 else ()),
    ]


def pods_of(engine: EngineSpec, pool: PoolSpec, site: VllmSettings) -> int:
    """Pods that one worker's ranks are divided among."""
    return 1 if site.is_process else pods_per_replica(engine, pool)


def vllm_environment(
    pool: PoolSpec, engine: EngineSpec, site: VllmSettings, startup_seconds: int
) -> dict[str, str]:
    on_cpu = {"VLLM_TARGET_DEVICE": "cpu"} if pool.gpu == NO_ACCELERATOR else {}
    threads = {}
    if engine.threads:
        threads["OMP_NUM_THREADS"] = str(
            _share(engine.threads, engine, pods_of(engine, pool, site))
        )
        if on_cpu:
            # its own choice of cores is the same in every process of a machine
            threads["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # else it ends itself after 600 s of loading
        "VLLM_ENGINE_READY_TIMEOUT_S": str(startup_seconds),
        **on_cpu,
        **threads,
        **{each.name: each.value for each in engine.env or ()},
        "VLLM_NIXL_SIDE_CHANNEL_HOST": site.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(site.side_channel),
    }


def vllm_logging(engine: EngineSpec) -> str:
    """vLLM's logging configuration, in JSON: errors go to the container's message too.  One of its
    processes logs why it cannot start, and another one's long traceback, which ends the log, hides
    that.
    """
    variables = {each.name: each.value for each in engine.env or ()}
    level = variables.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    handlers = {
        "vllm": {
            "class": "logging.StreamHandler",
            "formatter": "vllm",
            "stream": "ext://sys.stdout",
        },
        "message": {
            "class": "logging.FileHandler",
            "formatter": "message",
            "level": "ERROR",
            "filename": TERMINATION_LOG,
        },
    }
    formatters = {
        "vllm": {
            "class": "vllm.logging_utils.NewLineFormatter",
            "datefmt": "%m-%d %H:%M:%S",
            "format": "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        },
        "message": {"format": "%(message)s"},
    }
    logger = {"handlers": list(handlers), "level": level, "propagate": False}
    return json_text(
        version=1,
        disable_existing_loggers=False,
        formatters=formatters,
        handlers=handlers,
        loggers={"vllm": logger},
    )


def _share(value: int, engine: EngineSpec, pods: int) -> int:
    """Even share of each data-parallel rank in what its pod has."""
    return max(1, value // max(1, engine.data_parallel_size // pods))


def flags_of_fields(engine: EngineSpec, flags: Mapping[str, str]) -> dict[str, object]:
    """Those of `flags`, by field, whose field is given."""
    return {
        flag: value
        for name, flag in flags.items()
        if name in engine.model_fields_set and (value := getattr(engine, name)) is not None
    }


def _adapters(model: ModelSpec, arguments: Iterable[str]) -> list[str]:
    if not model.adapters:
        return []
    given = {flag.name for flag in flags_of(arguments)}
    # by default vLLM computes with one in a step, and requests of the others wait
    slots = [] if "max-loras" in given else ["--max-loras", str(min(len(model.adapters), 8))]
    modules = [
        json_text(name=each.name, path=adapter_path(model, each), base_model_name=model.name)
        for each in model.adapters
    ]
    return ["--enable-lora", *slots, "--lora-modules", *modules]


def max_lora_rank(arguments: Iterable[str]) -> int | None:
    """As the flag says it; None = it is not given, or is no number, which vLLM refuses.

    >>> max_lora_rank(["--max_lora_rank=32", "-ep"]), max_lora_rank(["--max-lora-r", "64"])
    (32, 64)
    """
    values = [flag.value for flag in flags_of(arguments) if flag.name == "max-lora-rank"]
    return int(values[-1]) if values and values[-1].isdigit() else None


def _caching(engine: EngineSpec) -> list[str]:
    """By default vLLM decides by the kind of model."""
    if "prefix_caching" not in engine.model_fields_set:
        return []
    return ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]


def json_text(**content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


ENGINE_CONTAINER = "engine"

_SCRATCH = "engine-tmp"
_SCRATCH_SIZE = "64Gi"  # graphs and kernels that it compiles are tens of GiB at the most
_HOME = {
    # a user without an entry in the image's /etc/passwd, and without a home that it may write to
    "HOME": "/tmp",
    "USER": "pdcluster",
}
_LOGGING = {"VLLM_LOGGING_CONFIG_PATH": f"{ENGINE_FOLDER}/{LOGGING_FILE}"}
_PERIOD_SECONDS, _FAILURES = 10, 2
# File in which the probe leaves what `nvidia-smi` says, for the server process without a GPU
GPU_REPORT = "/dev/shm/pdcluster-gpus.csv"

_REPORT = f"""\
import os, subprocess
fields = "name,memory.total,memory.used,utilization.gpu,utilization.memory"
ask = ["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"]
pipes = {{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "backslashreplace"}}
try:
    smi = subprocess.Popen(ask, **pipes)
    said = smi.communicate(timeout=3)[0]
except subprocess.TimeoutExpired:
    smi.kill()
    said = "no answer within 3 s"
except OSError as e:
    said = str(e)
try:
    with open("{GPU_REPORT}.new", "w") as file:
        file.write(said)
    os.replace("{GPU_REPORT}.new", "{GPU_REPORT}")
except OSError:
    pass
"""
# Ends with status 1 where the server process says that the engine is stalled, and only there: a
# server process that does not answer is no reason to lose an engine
_STALLED = f"""\
import sys, urllib.error, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
try:
    direct.open("http://127.0.0.1:{HTTP_PORT}/engine/health", timeout=5)
except urllib.error.HTTPError as e:
    if e.code == 503:
        sys.exit(e.read(500).decode(errors="replace"))
except OSError:
    pass
"""


def engine_container(
    cluster: PDCluster,
    pool: PoolSpec,
    engine: EngineSpec,
    *,
    command: list[str],
    variables: Mapping[str, str],
    resources: dict[str, Any],
    mounts: tuple[Manifest, ...],
) -> Manifest:
    """engine: of the role, a stock one; resources: of the role, its accelerators included; mounts:
    of the model
    """
    environment = {**_HOME, **(_LOGGING if engine.type == VLLM else {}), **variables}
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "imagePullPolicy": cluster.spec.image.pull_policy,
        "restartPolicy": "Always",
        "command": command,
        "env": [
            *field_variables({"POD_IP": "status.podIP"}),
            # the API server leaves an empty value out
            *(
                {"name": name, **({"value": value} if value else {})}
                for name, value in environment.items()
            ),
        ],
        "resources": resources,
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": _SCRATCH, "mountPath": "/tmp"},
            {"name": "engine", "mountPath": ENGINE_FOLDER, "readOnly": True},
            *mounts,
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "livenessProbe": {
            "exec": {"command": ["python3", "-c", _probe(pool)]},
            "periodSeconds": _PERIOD_SECONDS,
            "timeoutSeconds": 10,
            "failureThreshold": _FAILURES,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _probe(pool: PoolSpec) -> str:
    return _STALLED if pool.gpu == NO_ACCELERATOR else _REPORT + _STALLED


def engine_volumes() -> list[Manifest]:
    return [{"name": _SCRATCH, "emptyDir": {"sizeLimit": _SCRATCH_SIZE}}]


def has_engine_container(record: Mapping[str, Any]) -> bool:
    workload = record.get("data", {}).get("statefulSet", {})
    pod = workload.get("spec", {}).get("template", {}).get("spec", {})
    return any(each.get("name") == ENGINE_CONTAINER for each in pod.get("initContainers") or ())
