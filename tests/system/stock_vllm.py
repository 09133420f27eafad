"""A real vLLM beside a worker, from the environment that `bench/peers/install_vllm.sh` makes.

Its flags are those of docs/engines.md.
"""

import json
from pathlib import Path
from typing import Any

from tests.ports import free_port, free_ports
from tests.system.client import MODEL, Json

FOLDER = Path.home() / ".cache" / "pdcluster" / "vllm"
SWITCH = "PDCLUSTER_TEST_VLLM"
"""Environment variable that asks for the tests with it: they take minutes."""

BLOCK = 32
NUM_BLOCKS = 256
MAX_MODEL_LEN = 1024


def stock_engine(model: Path, role: str, *, traces: str = "", size: int = 1, **over: Any) -> Json:
    """The section `engine` of a worker in whose place a vLLM computes.

    traces: URL of a collector that takes OTLP over HTTP; empty = no traces.
    size:   number of its data-parallel ranks.
    """
    ports = {"port": free_port()}
    ports |= {name: free_ports(size) for name in ("kvEventsPort", "sideChannelPort")}
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports["sideChannelPort"]),
    }
    flags = command(model, role, ports)
    if size > 1:
        flags += ["--data-parallel-size", str(size), "--api-server-count", "1"]
        over["dataParallelSize"] = size
    if traces:
        flags += ["--otlp-traces-endpoint", f"{traces}/v1/traces"]
        environment |= {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id=vllm-{role}",
        }
    vllm = {**ports, "command": flags, "env": environment}
    return {"type": "vllm", "blockSize": BLOCK, "vllm": vllm, **over}


def command(model: Path, role: str, ports: dict[str, int]) -> list[str]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{ports['kvEventsPort']}",
        "topic": "",
    }
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
    }
    return [
        *(str(FOLDER / "bin" / "vllm"), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(ports["port"])),
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-logprobs", "21"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--scheduling-policy"),
        *("priority", "--disable-uvicorn-access-log", "--generation-config", "vllm"),
        *("--kv-events-config", json.dumps(events)),
        *(() if role == "mixed" else ("--kv-transfer-config", json.dumps(transfer))),
    ]
