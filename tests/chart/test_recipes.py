"""examples/recipes/: what each head says was verified, and that docs/recipes.md lists them all."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_schema.load import load, load_applied
from pdctl.cli.main import app
from tests.golden.operator.operator_adapter import manifests
from tests.system.stock_vllm import FOLDER, SWITCH

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
HEAD = ("# Source: ", "# Verified: ", "# Not run: ", "#   kubectl apply -f examples/recipes/")
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="command"))
for line in json.load(sys.stdin):
    print(" ".join(line), file=sys.stderr)
    parser.parse_args(line)
"""


def engines(path: Path) -> Iterator[dict[str, Any]]:
    """The engine's container of each pod."""
    for manifest in manifests(yaml.safe_load(path.read_text())):
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        containers = (*pod.get("initContainers", ()), *pod.get("containers", ()))
        yield from (each for each in containers if each["name"] == "engine")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_its_head_says_what_is_known_of_it(path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(path)])
    lines = path.read_text().splitlines()

    assert (result.exit_code, "is valid, revision" in result.output) == (0, True), result.output
    assert load_applied(path) == load(path)
    assert [start for start in HEAD if not any(line.startswith(start) for line in lines)] == []
    assert f"#   kubectl apply -f examples/recipes/{path.name}" in lines


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_renders_an_engine_with_the_gpus_of_its_ranks(path: Path) -> None:
    spec = load(path).spec
    sizes = sorted(
        spec.gpus_per_replica(role, pool) // pods
        for role, one in spec.roles.computing().items()
        for pool in one.pools
        if (pods := spec.pods_per_replica(role, pool))
        for _ in range(min(pods, 2))  # a leader, and its followers alike
    )
    found = sorted(int(each["resources"]["limits"]["nvidia.com/gpu"]) for each in engines(path))

    assert found == sizes


def test_every_recipe_is_in_the_table_of_the_docs() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()

    assert re.findall(r"\]\(\.\./examples/recipes/(\S+)\)", page) == [p.name for p in RECIPES]


@pytest.mark.skipif(os.environ.get(SWITCH) != "1", reason=f"set {SWITCH}=1 for stock vLLM")
def test_the_engine_takes_every_command_line() -> None:
    # the kubelet puts the rank in
    lines = [
        [word.replace("$(LWS_WORKER_INDEX)", "1") for word in each["command"][1:]]
        for path in RECIPES
        for each in engines(path)
    ]
    done = subprocess.run(
        [FOLDER / "bin" / "python", "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu"},
    )

    assert done.returncode == 0, done.stderr
