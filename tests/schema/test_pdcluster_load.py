"""Reading a PDCluster from a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load, load_all, load_applied, parse, parse_applied, parse_stored
from pdcluster_schema.pdcluster import PDCluster
from tests.schema.object_cases import vllm

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert load(path).kind == "PDCluster"


def test_load_finds_the_cluster_among_other_objects(
    document: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all([{"kind": "Namespace"}, document, None]))

    assert load(path).metadata.name == "chat"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "must hold one object of kind PDCluster, not nothing; write one with `kind: PDCluster`",
        ),
        ("kind: Pod", "must hold one object of kind PDCluster, not Pod"),
        ("- 1", "must hold one object of kind PDCluster, not no object"),
        (
            "kind: PDCluster\n---\nkind: Pod\n---\nkind: PDCluster",
            "holds 2 objects of kind PDCluster, which begin in lines 1, 5; write each in a file",
        ),
        ("a: " + "[" * 5000, "not YAML: maximum recursion depth exceeded"),
        ("? [a]\n: 1", "not YAML: "),
    ],
)
def test_load_refuses_what_is_no_cluster(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(InvalidObjectError) as refused:
        load(path)

    assert str(refused.value).startswith(message)


def test_load_all_names_the_faults_of_each_object_by_line(
    document: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "all.yaml"
    other = {**document, "spec": {**document["spec"], "nodes": 3}}
    path.write_text(yaml.safe_dump_all([document, {"kind": "Namespace"}, document]))
    assert [cluster.metadata.name for cluster in load_all(path)] == ["chat", "chat"]

    path.write_text(yaml.safe_dump_all([other, document, other]))
    lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if "nodes: 3" in line]
    with pytest.raises(InvalidObjectError) as refused:
        load_all(path)

    assert [(fault.path, fault.line) for fault in refused.value.faults] == [
        ("spec.nodes", line) for line in lines
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: [", 1, "not YAML: "),
        ("a: 1\nb: 2\na: 3", 3, "not YAML: 'a' is given twice; correct that line"),
        ("a: 1\nb: [2020-13-45]", 2, "not YAML: month must be in 1..12; correct that line"),
        ("a:\n  b: !!bool maybe", 2, "not YAML: 'maybe'; correct that line"),
        ("a: !!python/object:os.system {}", 1, "not YAML: could not determine a constructor"),
    ],
)
def test_a_fault_of_yaml_has_its_line(text: str, line: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(InvalidObjectError) as refused:
        load(tmp_path / "cluster.yaml")

    (fault,) = refused.value.faults
    assert fault.line == line
    assert str(fault).startswith(message)


WRONG = """\
kind: Namespace
---
apiVersion: pdcluster.io/v1alpha1
kind: PDCluster
metadata:
  name: chat
  labels:
    a.b/c: {d: 1}
spec:
  model: {name: tiny, path: /m, none: 1}
  engine: &engine
    threads: two
  roles:
    prefill:
      engine: *engine
      pools:
      - {name: cpu, replicas: -1}
    decode:
      engine: *engine
      pools:
        - name: cpu
          replicas: 1
        -
          name: cpu2
          replica: 1
"""


@pytest.mark.parametrize("read", [load, load_applied])
def test_faults_name_the_line_of_their_field(
    read: Callable[[Path], PDCluster], tmp_path: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(WRONG)
    with pytest.raises(InvalidObjectError) as refused:
        read(tmp_path / "cluster.yaml")

    lines = {fault.path: fault.line for fault in refused.value.faults}
    assert lines == {
        "metadata.labels.a.b/c": 8,
        "spec.model.none": 10,
        "spec.engine.threads": 12,
        "spec.roles.prefill.engine.threads": 12,
        "spec.roles.prefill.pools[0].replicas": 17,
        "spec.roles.decode.engine.threads": 12,
        "spec.roles.decode.pools[1].replicas": 24,
        "spec.roles.decode.pools[1].replica": 25,
    }


def test_load_refuses_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidObjectError, match="cannot be read: No such file or directory; give the path of"
    ):
        load(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidObjectError, match="cannot be read: it is not UTF-8 text"):
        load(tmp_path / "binary.yaml")


def test_parse_leaves_out_what_the_server_owns(document: dict[str, Any]) -> None:
    document["metadata"] |= {
        "uid": "1",
        "resourceVersion": "2",
        "managedFields": [],
        "creationTimestamp": "now",
        "generateName": "c",
    }
    document["status"] = {"ready": True}

    assert parse(document).metadata.name == "chat"


def test_parsed_cluster_is_frozen(
    document: dict[str, Any], write_document: Callable[[dict[str, Any]], Path]
) -> None:
    cluster = load(write_document(document))
    with pytest.raises(ValueError, match="frozen"):
        cluster.spec.service.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("path", ["~/models/tiny", "models/tiny", "./tiny", "~"])
def test_a_path_of_this_machine_is_for_pdctl_alone(path: str, document: dict[str, Any]) -> None:
    document["spec"]["model"]["path"] = path

    assert parse(document).spec.model.path == path
    with pytest.raises(InvalidObjectError) as refused:
        parse_applied(document)
    (fault,) = refused.value.faults
    assert fault.path == "spec.model.path"
    assert f"must begin with /, not {path!r}" in fault.reason
    assert "give pvc" in fault.fix


def test_a_draft_models_path_of_this_machine_is_for_pdctl_alone(document: dict[str, Any]) -> None:
    document["spec"]["roles"]["decode"]["engine"] = {
        "speculation": {"method": "draft", "draftModel": "small"}
    }
    assert parse(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse_applied(document)
    (fault,) = refused.value.faults
    assert fault.path == "spec.roles.decode.engine.speculation.draftModel"
    assert "must begin with /, not 'small'" in fault.reason

    document["spec"]["model"] = {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models"}}
    assert parse_applied(document)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "tiny", "path": "/models/tiny"},
        {"name": "tiny", "path": "tiny", "pvc": {"claimName": "models"}},
        {"name": "tiny", "huggingFace": {"repo": "a/b"}},
    ],
)
def test_a_model_that_a_pod_can_find_may_be_applied(
    model: dict[str, Any], document: dict[str, Any]
) -> None:
    document["spec"]["model"] = model

    assert parse_applied(document) == parse(document)


def test_stored_object_may_have_fields_of_another_version(document: dict[str, Any]) -> None:
    """An API server fills in the defaults of its own CRD, which an operator of another version does
    not know.
    """
    plain, _ = parse_stored(document)
    document["spec"]["roles"]["decode"]["pools"][0]["gpusPerNode"] = 1
    document["spec"]["rollout"] = {"later": {"value": 3}}
    document["spec"]["future"] = [1]
    document["status"] = {"observedGeneration": 1}

    cluster, unknown = parse_stored(document)

    assert cluster == plain
    assert sorted(unknown) == [
        "spec.future",
        "spec.roles.decode.pools.0.gpusPerNode",
        "spec.rollout.later",
    ]
    assert document["spec"]["future"] == [1]


def test_stored_object_with_other_faults_is_refused(document: dict[str, Any]) -> None:
    document["spec"]["future"] = 1
    document["spec"]["roles"]["decode"]["pools"][0]["replicas"] = 2000
    with pytest.raises(InvalidObjectError) as refused:
        parse_stored(document)

    assert [fault.path for fault in refused.value.faults] == ["spec.roles.decode.pools[0].replicas"]


@pytest.mark.parametrize(
    "image",
    ["r:5000/vllm-openai:0.32.0-cu129", "vllm:nightly", "vllm@sha256:0321", "acme/pf:v1.2.0"],
)
def test_images_of_one_version_or_without_a_version_are_a_pair(
    image: str, document: dict[str, Any]
) -> None:
    vllm()(document)
    document["spec"]["roles"]["prefill"]["engine"] = {"image": image}

    assert parse(document).spec.engine_of("prefill").image == image


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("my/vllm-openai:v0.31.0-cu129", "0.31.0"),
        ("vllm-openai:v0.32.1", "0.32.1"),
        ("vllm-openai-cpu:0.32.0rc1", "0.32.0rc1"),
    ],
)
def test_images_of_two_versions_are_no_pair(
    image: str, version: str, document: dict[str, Any]
) -> None:
    vllm()(document)
    document["spec"]["roles"]["decode"]["engine"] = {"image": image}

    with pytest.raises(InvalidObjectError) as refused:
        parse(document)
    assert str(refused.value.faults[0]) == (
        f"spec.roles.decode.engine.image: is vLLM {version}, and that of prefill 0.32.0: KV moves "
        "between equal versions alone; give both roles one version"
    )


@pytest.mark.parametrize(
    ("gpu", "rollout", "front", "strategy"),
    [
        ("cpu", {}, None, "BlueGreen"),
        ("B200", {}, None, "Rolling"),
        ("B200", {}, "router", "BlueGreen"),
        ("B200", {"strategy": "Recreate"}, None, "Recreate"),
        ("cpu", {"maxSurge": 2}, None, "Rolling"),
        ("cpu", {"onFailure": "Pause"}, None, "Rolling"),
        ("cpu", {"gracePeriodSeconds": 60}, None, "BlueGreen"),
    ],
)
def test_strategy_of_a_roll_out_follows_the_accelerators(
    gpu: str, rollout: dict[str, Any], front: str | None, strategy: str, document: dict[str, Any]
) -> None:
    roles = document["spec"]["roles"]
    roles["decode"]["pools"][0]["gpu"] = gpu
    if front is not None:
        roles[front] = {"pools": [{"name": "front", "replicas": 1}]}
    document["spec"]["rollout"] = rollout

    assert parse(document).spec.rollout_strategy == strategy
