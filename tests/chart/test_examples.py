"""examples/: valid, explained, and what their comments name is there.

The API server's word on them is in tests/apiserver.
"""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from pdcluster_schema.load import load, load_applied
from pdcluster_schema.routing import DecodeScoreSpec, OffloadSpec, PrefillQueueSpec
from pdctl.cli.main import app
from pdctl.local.ineffective import ineffective_remarks
from pdctl.local.up import UpRequest, prepare
from tests.operator.pdctl.stub_model import stub_model
from tests.ports import free_port

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
ON_KUBERNETES = [path for path in EXAMPLES if "kubectl apply -f" in path.read_text()]


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


def pools(name: str, role: str) -> dict[str, tuple[int, int, int]]:
    """Sizes of each pool by its gpu: minReplicas, replicas, maxReplicas."""
    return {
        pool["gpu"]: (pool.get("minReplicas", 0), pool["replicas"], pool["maxReplicas"])
        for pool in document(name)["spec"]["roles"][role]["pools"]
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_valid_and_begins_with_what_it_is(path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(path)])

    assert (result.exit_code, "is valid, revision" in result.output) == (0, True)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_may_be_applied_as_it_is(path: Path) -> None:
    assert load_applied(path) == load(path)


@pytest.mark.parametrize(
    "name", ["autoscale.yaml", "chat.yaml", "hugging-face.yaml", "mixed.yaml", "two-by-two.yaml"]
)
def test_example_on_cpus_runs_on_one_machine_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sample model in the cache, from wherever Kubernetes would take it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache/pdcluster/smollm2-135m-instruct"
    stub_model(folder)
    prepared = prepare(UpRequest(FOLDER / name, load(FOLDER / name), free_port(), tmp_path))

    assert prepared.model.path == folder
    remarks = ineffective_remarks(prepared.request.cluster)
    assert any("spec.model." in line for line in remarks) is (name != "hugging-face.yaml")


@pytest.mark.parametrize("path", ON_KUBERNETES, ids=lambda path: path.name)
def test_commands_in_comments_name_what_is_in_the_file(path: Path) -> None:
    text = path.read_text()
    name, roles = document(path.name)["metadata"]["name"], document(path.name)["spec"]["roles"]
    scalers = {
        f"{name}-{role}-{pool['name']}" for role, one in roles.items() for pool in one["pools"]
    }

    assert set(re.findall(r"kubectl apply -f (\S+)", text)) == {f"examples/{path.name}"}
    assert set(re.findall(r"pdc/([\w-]+)", text)) <= {name}
    assert set(re.findall(r"pdps/([\w-]+)", text)) <= scalers


@pytest.mark.parametrize("path", ON_KUBERNETES, ids=lambda path: path.name)
def test_every_secret_and_claim_of_an_example_is_explained(path: Path) -> None:
    def named(value: Any, key: str = "") -> set[str]:
        if isinstance(value, dict):
            return {found for child, inner in value.items() for found in named(inner, child)}
        return {value} if re.search("Secret$|^claimName$", key) else set()

    comments = "\n".join(re.findall("#.*", path.read_text()))
    missing = {
        name
        for name in named(document(path.name)["spec"])
        if name not in comments and name != "models"
    }

    assert missing == set()


@pytest.mark.parametrize(
    ("name", "weights"), [("b200-b300.yaml", 141 * 10**9), ("two-pool-prefill.yaml", 64 * 10**9)]
)
def test_weights_and_kv_cache_fit_the_memory_of_a_worker_that_computes_on_the_cpu(
    name: str, weights: int
) -> None:
    spec = load(FOLDER / name).spec
    for role, one in spec.roles.present().items():
        limit = int(str(one.resources.limits["memory"]).removesuffix("Gi")) << 30
        assert weights + spec.engine_of(role).kv_cache_memory < 0.97 * limit, role
        assert one.resources.requests["memory"] == one.resources.limits["memory"]


def test_chat_fits_a_small_machine_while_it_rolls_out() -> None:
    roles = document("chat.yaml")["spec"]["roles"]
    cpu = sum(
        int(role["resources"]["requests"]["cpu"].removesuffix("m")) * role["pools"][0]["replicas"]
        for role in roles.values()
    )
    memory = sum(
        int(role["resources"]["limits"]["memory"].removesuffix("Gi")) * role["pools"][0]["replicas"]
        for role in roles.values()
    )

    assert (2 * cpu <= 1500, 2 * memory <= 16) == (
        True,
        True,
    )  # old and new beside each other on 2 cores and 24 GiB, with room for the rest


def test_the_first_day_fits_the_node_that_it_asks_for_while_it_rolls_out() -> None:
    page = (FOLDER.parent / "docs" / "first-day.md").read_text()
    asked = re.search(r"a node with (\d+) free cores and (\d+) GB", page)
    roles = document("hugging-face.yaml")["spec"]["roles"]
    requests = [role["resources"]["requests"] for role in roles.values()]
    sizes = [role["pools"][0]["replicas"] for role in roles.values()]
    assert asked is not None

    # old and new beside each other, with the operator and an etcd
    beside, memory_beside = 2 * 50, 2 * (128 << 20)
    cpu = sum(
        n * int(each["cpu"].removesuffix("m")) for n, each in zip(sizes, requests, strict=True)
    )
    memory = sum(
        n * int(each["memory"].removesuffix("Mi")) << 20
        for n, each in zip(sizes, requests, strict=True)
    )
    assert 2 * cpu + beside <= 1000 * int(asked[1])
    assert 2 * memory + memory_beside <= int(asked[2]) * 10**9


def choices_of(policy: Any, field: str) -> tuple[str, ...]:
    """The names that a field of a section takes."""
    found: tuple[str, ...] = get_args(policy.model_fields[field].annotation)
    return found


@pytest.mark.parametrize(
    ("name", "section", "field"),
    [
        ("offload.yaml", OffloadSpec, "policy"),
        ("offload.yaml", PrefillQueueSpec, "mode"),
        ("prefix-routing.yaml", DecodeScoreSpec, "policy"),
    ],
)
def test_example_and_docs_name_every_routing_policy(name: str, section: Any, field: str) -> None:
    example = (FOLDER / name).read_text()
    docs = (FOLDER.parent / "docs" / "routing.md").read_text()

    assert [
        policy for policy in choices_of(section, field) if not re.search(rf"\b{policy}\b", example)
    ] == []
    assert [
        policy
        for policy in choices_of(section, field)
        if f"| `{policy}`" not in docs and f"| **`{policy}`**" not in docs
    ] == []
