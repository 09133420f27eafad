"""The container of a stock engine: a native sidecar, so that it outlives the server process, whose
streams need it (docs/design/stock-engine.md).
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_api.manifests.engine_config import ENGINE_FOLDER, LOGGING_FILE
from pdcluster_api.manifests.objects import Manifest, container_security
from pdcluster_api.manifests.vllm import IN_CONTAINER, vllm_command, vllm_environment
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import HTTP_PORT
from pdcluster_schema.sections import PoolSpec

ENGINE_CONTAINER = "engine"
SHARED_MEMORY = "8Gi"  # A bound, not a reservation: ranks of one engine exchange tensors in it

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
    model_path: str,
    *,
    resources: dict[str, Any],
    mounts: tuple[Manifest, ...],
) -> Manifest:
    """The sidecar of workers of a role.

    engine:    of that role, a stock one
    resources: of the role, its accelerators included
    mounts:    of the model
    """
    environment = {**_HOME, **_LOGGING, **vllm_environment(pool, engine, IN_CONTAINER)}
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "imagePullPolicy": cluster.spec.image.pull_policy,
        "restartPolicy": "Always",
        "command": vllm_command(cluster, pool, engine, model_path, IN_CONTAINER),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
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
    """Volumes that only the sidecar needs."""
    return [{"name": _SCRATCH, "emptyDir": {"sizeLimit": _SCRATCH_SIZE}}]


def has_engine_container(record: Mapping[str, Any]) -> bool:
    workload = record.get("data", {}).get("statefulSet", {})
    pod = workload.get("spec", {}).get("template", {}).get("spec", {})
    return any(each.get("name") == ENGINE_CONTAINER for each in pod.get("initContainers") or ())
