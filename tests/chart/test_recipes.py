"""examples/recipes/: what each head says was verified, and that docs/recipes.md lists them all."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_schema.load import load, load_applied
from pdcluster_schema.stock_versions import tagged_version
from pdctl.cli.main import app
from tests.golden.operator.operator_adapter import manifests
from tests.system.stock_vllm import NOT_ASKED, installed, parsed

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
PAGE = ROOT / "docs" / "recipes.md"
HEAD = ("# Source: ", "# Verified: ", "# Not run: ", "#   kubectl apply -f examples/recipes/")


def engines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The engine's container of each workload, and its number of pods."""
    for manifest in manifests(yaml.safe_load(path.read_text())):
        spec = manifest.get("spec", {})
        pod = spec.get("template", {}).get("spec", {})
        for each in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            if each["name"] == "engine":
                yield spec["replicas"], each


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_its_head_says_what_is_known_of_it(path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(path)])
    lines = path.read_text().splitlines()

    assert (result.exit_code, "is valid, revision" in result.output) == (0, True), result.output
    assert load_applied(path) == load(path)
    assert [start for start in HEAD if not any(line.startswith(start) for line in lines)] == []
    assert f"#   kubectl apply -f examples/recipes/{path.name}" in lines


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_pods_of_a_recipe_have_the_accelerators_that_the_docs_say(path: Path) -> None:
    spec = load(path).spec
    needed = sum(
        spec.gpus_per_replica(role, pool) * pool.replicas
        for role, one in spec.roles.computing().items()
        for pool in one.pools
    )
    gpus = [
        pods * int(each["resources"]["limits"]["nvidia.com/gpu"]) for pods, each in engines(path)
    ]
    row = next(line for line in PAGE.read_text().splitlines() if f"/{path.name})" in line)

    assert (sum(gpus), row.split(" | ")[-1]) == (needed, f"{needed} |")


def test_every_recipe_is_in_the_table_of_the_docs() -> None:
    names = re.findall(r"\]\(\.\./examples/recipes/(\S+)\)", PAGE.read_text())

    assert names == [p.name for p in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_pod_template_of_a_recipe_gives_rights_alone(path: Path) -> None:
    """Claims, devices, /dev/shm, times and sizes have fields."""
    template = yaml.safe_load(path.read_text())["spec"].get("podTemplate")
    if template is None:
        return
    ((engine,), keys) = template["spec"]["initContainers"], set(template["spec"])

    assert (keys, set(engine)) == ({"initContainers"}, {"name", "securityContext"})


@pytest.mark.skipif(not installed(), reason=NOT_ASKED)
@pytest.mark.timeout(300)
def test_the_engine_of_a_recipe_s_version_takes_every_command_line() -> None:
    lines = defaultdict[str, list[list[str]]](list)
    for path in RECIPES:
        for _, each in engines(path):
            # the kubelet fills in what is like $(LWS_WORKER_INDEX)
            line = [re.sub(r"^\$\(\w+\)$", "1", argument) for argument in each["command"][1:]]
            lines[tagged_version(each["image"])].append(line)

    parsers = installed(parser_only=True)
    taken = {version: parsed(parsers[version], lines[version]) for version in lines}
    assert taken == {version: [" ".join(line) for line in each] for version, each in lines.items()}
