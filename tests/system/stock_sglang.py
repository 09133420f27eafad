"""A real SGLang beside a worker, from the environment that `bench/peers/install_sglang.sh` makes,
with the command line that PDCluster renders.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pdcluster_api.manifests.stock import DEFAULT_COMMANDS, stock_command, stock_environment
from pdcluster_api.manifests.vllm import VllmSettings
from tests.operator.pdcluster_api.manifests.rendering import cluster_of
from tests.ports import free_port
from tests.schema.object_cases import CPU, at, both, sglang
from tests.system.client import MODEL, Json

SWITCH = "PDCLUSTER_TEST_SGLANG"
"""Environment variable that asks for the tests with it: they take a minute or two."""

FOLDER = Path.home() / ".cache" / "pdcluster" / "sglang"
NOT_ASKED = f"set {SWITCH}=1, after bench/peers/install_sglang.sh {FOLDER}"

BLOCK, MAX_SEQUENCES = 16, 8

_PARSE = """\
import json, sys
from sglang.srt.server_args import prepare_server_args

for line in json.load(sys.stdin):
    prepare_server_args(line)
    print(*line)
"""


def is_installed() -> bool:
    return bool(os.environ.get(SWITCH)) and (FOLDER / ".ready").is_file()


def parsed(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines that SGLang's own parser took, up to the first that it refuses."""
    done = subprocess.run(
        [FOLDER / "bin" / "python", "-W", "ignore", "-c", _PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    took = [line for line in done.stdout.splitlines() if line.startswith("--")]
    return took if done.returncode == 0 else [*took, done.stderr[-2000:]]


def sglang_engine(model: Path) -> Json:
    """The section `engine` of a mixed worker in whose place an SGLang computes."""
    _, *module = DEFAULT_COMMANDS["sglang"]
    cluster = cluster_of(
        both(
            sglang(
                command=[str(FOLDER / "bin" / "python"), *module],
                blockSize=BLOCK,
                maxSequences=MAX_SEQUENCES,
                maxModelLen=1024,
                numBlocks=256,
                threads=1,
                # without SGLang's kernels for x86-64 and vLLM's, which package registries lack
                args=["--attention-backend", "torch_native", "--model-impl", "transformers"],
            ),
            at("spec.roles", {"mixed": {"pools": [CPU]}}),
            at("spec.model.name", MODEL),
            at("spec.model.dtype", "float32"),
        )
    )
    engine, role = cluster.spec.engine_of("mixed"), cluster.spec.roles.present()["mixed"]
    (pool,) = role.pools
    site = VllmSettings(http=free_port(), kv_events=free_port(), is_process=True)
    return {
        "type": "sglang",
        "blockSize": BLOCK,
        "maxSequences": MAX_SEQUENCES,
        "vllm": {
            "port": site.http,
            "kvEventsPort": site.kv_events,
            "command": stock_command(cluster, pool, engine, str(model), site),
            "env": stock_environment(pool, engine, site, role.startup_seconds),
        },
    }
