"""A real vLLM beside a worker, from the environments that `bench/peers/install_vllm.sh` makes.

Its flags are those of docs/engines.md.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.make_tiny_model import VOCAB_SIZE, make_tiny_model
from tests.ports import free_port, free_ports
from tests.system.client import MODEL, Json
from tests.system.cluster import Pair
from tests.system.tokens import write_tokenizer

SWITCH = "PDCLUSTER_TEST_VLLM"
"""Environment variable that asks for the tests with it: they take minutes."""

FOLDER = Path.home() / ".cache" / "pdcluster" / "vllm"
NOT_ASKED = (
    f"set {SWITCH}=1, after bench/peers/install_vllm.sh {FOLDER} for the newest vLLM that runs "
    f"here, and {FOLDER}-0.31 0.31 and the like for others"
)


def installed(*, parser_only: bool = False) -> dict[str, Path]:
    """Folders by version, if they are asked for.  parser_only: those that cannot serve, too."""
    ready = sorted(FOLDER.parent.glob("vllm*/.ready")) if os.environ.get(SWITCH) else ()
    said = {file.read_text().splitlines()[0]: file.parent for file in ready}
    found = {text.partition(" ")[0]: folder for text, folder in said.items()}
    return found if parser_only else {each: found[each] for each in said if " " not in each}


START_SECONDS = 600.0

LEASE_SECONDS = 60
"""While one vLLM starts or spins, a server process may get no turn for as long as other tests'
leases last.
"""

BLOCK = 32
NUM_BLOCKS = 256
MAX_MODEL_LEN = 1024


_PARSE = """\
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
for line in json.load(sys.stdin):
    parser.parse_args(line)
    print(*line)
"""


def parsed(folder: Path, lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines that vLLM's own parser took, up to the first that it refuses.  Each begins with
    `serve`.
    """
    done = subprocess.run(
        [folder / "bin" / "python", "-c", _PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
        timeout=300,
    )
    took = [line for line in done.stdout.splitlines() if line.startswith("serve ")]
    return took if done.returncode == 0 else [*took, done.stderr[-2000:]]


def stock_engine(
    model: Path,
    role: str,
    *,
    folder: Path = FOLDER,
    traces: str = "",
    size: int = 1,
    **over: Any,
) -> Json:
    """The section `engine` of a worker in whose place a vLLM computes.

    folder: of the vLLM.
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
    flags = command(folder, model, role, ports)
    if size > 1:
        flags += ["--data-parallel-size", str(size), "--api-server-count", "1"]
        over["dataParallelSize"] = size
    if (tensor := over.get("tensorParallelSize", 1)) > 1:
        flags += ["--tensor-parallel-size", str(tensor)]
    if traces:
        flags += ["--otlp-traces-endpoint", f"{traces}/v1/traces"]
        environment |= {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id=vllm-{role}",
        }
    vllm = {**ports, "command": flags, "env": environment}
    return {"type": "vllm", "blockSize": BLOCK, "vllm": vllm, **over}


def command(folder: Path, model: Path, role: str, ports: dict[str, int]) -> list[str]:
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
        *(str(folder / "bin" / "vllm"), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(ports["port"])),
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-logprobs", "21"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--scheduling-policy"),
        *("priority", "--disable-uvicorn-access-log", "--generation-config", "vllm"),
        *("--kv-events-config", json.dumps(events)),
        *(() if role == "mixed" else ("--kv-transfer-config", json.dumps(transfer))),
    ]


def wait_ready(pair: Pair) -> None:
    """Wait until both serve and know one another; a stock engine takes a minute to start."""
    for worker in (pair.prefill, pair.decode):
        worker.wait_ready(START_SECONDS)
    pair.cluster.wait_connected()


def make_wide_model(folder: Path) -> Path:
    """Make a model of the least heads that vLLM takes, with a tokenizer."""
    make_tiny_model("llama-wide", folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder
