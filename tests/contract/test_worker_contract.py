"""Contract of operator and worker, which never import each other: files, etcd keys and records,
ports, metric names, TLS.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
import yaml
from pydantic.alias_generators import to_snake

from pdcluster_api.apiserver import pods
from pdcluster_api.discovery import etcd
from pdcluster_api.discovery.etcd import read_disaggregation
from pdcluster_api.manifests.vllm import VllmSettings
from pdcluster_api.manifests.worker_config import WorkerFileSettings, engine_file, policy_file
from pdcluster_api.plan.observed import state
from pdcluster_api.plan.observed.state import WorkerDisaggregation
from pdcluster_operator.reconcile.observation import is_key
from pdcluster_schema import values
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.load import load, parse
from pdcluster_schema.model import ModelSpec
from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.stock_engine import STOCK_ONLY
from pdcluster_worker import errors
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.policy import load_policy
from pdcluster_worker.config.worker import (
    DiscoveryConfig,
    ModelConfig,
    WorkerConfig,
    load_worker_config,
)
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.peers import records
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.text.chat_template import TEMPLATES
from pdcluster_worker.serving.disaggregation_stats import MAX_REASON, MAX_REFUSED
from tests.operator.pdcluster_api.manifests.field_values import ENGINE_VALUES, SCHEDULING_VALUES
from tests.schema.object_cases import minimal

ROOT = Path(__file__).parents[2]
ENTRY = "alice"
"""The key of the one entry of each map."""

OF_MODEL = {"dtype", "chat_template", "tool_parser", "reasoning_parser", "frontend"}
"""Settings of the model in a worker's file, beside name and path."""

STOCK = {to_snake(field) for field in STOCK_ONLY}
"""Fields of the object's engine that a worker has in its section `vllm`, whole commands and all."""

SITE = WorkerFileSettings(
    model_path="/m", etcd_endpoints=("127.0.0.1:2379",), ca="/ca", certificate="/c", key="/k"
)


def of_both(engine: EngineConfig) -> dict[str, Any]:
    """A worker's fields of its engine that the object has too."""
    fields: dict[str, Any] = msgspec.to_builtins(engine)
    return {name: value for name, value in fields.items() if name != "vllm"}


def rendered(example: str, role: str) -> tuple[dict[str, Any], dict[str, Any]]:
    cluster = load(ROOT / "examples" / example)
    pool = cluster.spec.roles.present()[role].pools[0]
    return engine_file(cluster, role, pool, cluster.spec.engine_of(role), SITE), policy_file(
        cluster
    )


def stock_engine() -> dict[str, Any]:
    """The section `vllm` of such a file, and of one beside the engine's container."""
    one, other = (stock_file(is_process=each)["engine"]["vllm"] for each in (False, True))
    section: dict[str, Any] = {**one, **other}
    return section


def stock_file(*, is_process: bool = True) -> dict[str, Any]:
    """The engine file of a worker that starts a stock engine; no value of that is the default."""
    document = minimal()
    document["spec"]["engine"] = {
        "type": "vllm",
        "blockSize": 32,
        "maxModelLen": 512,
        "allowUnknownVersion": True,
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--max-lora-rank", "32"],
    }
    document["spec"]["model"] |= {
        "frontend": "engine",
        "adapters": [{"name": "sql", "path": "/sql"}],
    }
    document["spec"]["roles"]["decode"]["startupTimeoutSeconds"] = 60
    cluster = parse(document)
    pool = cluster.spec.roles.present()["decode"].pools[0]
    vllm = VllmSettings(http=1, kv_events=2, side_channel=3, is_process=is_process)
    engine = cluster.spec.engine_of("decode")
    file = engine_file(cluster, "decode", pool, engine, replace(SITE, vllm=vllm))
    # that is of several pods, where none is a process
    file["engine"]["vllm"]["eventsFromPods"] = True
    return file


def adapting_file() -> dict[str, Any]:
    """The engine file of a worker that loads adapters while it runs."""
    document = minimal()
    document["spec"]["model"]["runtimeAdapters"] = {"path": "/lora", "memory": "1Gi"}
    cluster = parse(document)
    pool = cluster.spec.roles.present()["decode"].pools[0]
    return engine_file(cluster, "decode", pool, cluster.spec.engine_of("decode"), SITE)


def nothing_by_default(scheduling: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both files of a cluster and a site of which every value is another than the default.

    scheduling: values that exclude those of other schedulers.
    """
    document = minimal()
    document["spec"]["model"] |= {
        "dtype": "float32",
        "chatTemplate": "{{ messages }}",
        "toolParser": "hermes",
        "reasoningParser": "none",
        "adapters": [{"name": ENTRY, "path": "/sql"}],
    }
    document["spec"]["engine"] = ENGINE_VALUES | scheduling
    document["spec"]["service"] = {"apiKeySecret": "keys"}
    document["spec"]["qos"] = {
        "degradation": {"smallerModel": {"name": "small", "url": "http://small"}},
        "tenants": {ENTRY: {"priority": "low"}},
    }
    cluster = parse(document)
    tls = {"ca": "/e/ca", "certificate": "/e/c", "key": "/e/k"}
    site = replace(
        SITE,
        host="127.0.0.1",
        http_host="0.0.0.0",
        http_port=1,
        grpc_port=2,
        kv_port=3,
        picker_port=5,
        head_port=4,
        num_headless=6,
        etcd_tls=tls,
        api_keys="/keys",
    )
    pool = cluster.spec.roles.present()["decode"].pools[0]
    return engine_file(
        cluster, "decode", pool, cluster.spec.engine_of("decode"), site
    ), policy_file(cluster)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("a", b"sk-alice"),
        ("a", b" sk-alice\r\n"),
        ("a", b"!~"),
        (".a", b"sk-alice"),
        ("a", b""),
        ("a", b" \n"),
        ("a", b"two words"),
        ("a", b"\x7f"),
        ("a", b"\xc3\xbc"),
    ],
)
def test_both_know_the_same_api_keys(entry: str, value: bytes, tmp_path: Path) -> None:
    (tmp_path / entry).write_bytes(value)
    try:
        takes = ApiKeys(tmp_path).tenant_of(value.strip().decode()) is not None
    except ConfigError:
        takes = False
    assert is_key(entry, value) == takes


@pytest.mark.parametrize(
    ("example", "role"),
    [
        ("chat.yaml", "prefill"),
        ("chat.yaml", "decode"),
        ("two-by-two.yaml", "prefill"),
        ("mixed.yaml", "mixed"),
    ],
)
def test_rendered_files_load_in_the_worker(example: str, role: str, tmp_path: Path) -> None:
    engine, policy = rendered(example, role)
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(engine))
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    loaded = load_worker_config(tmp_path / "engine.yaml")

    assert loaded.role == role
    assert of_both(loaded.engine) == load(ROOT / "examples" / example).spec.engine_of(
        role
    ).model_dump(by_alias=True, exclude=STOCK)
    assert load_policy(tmp_path / "policy.yaml").model_dump(mode="json", by_alias=True) == policy


def test_rendered_files_set_every_field_of_the_worker() -> None:
    """Fields without a default: all but the lease, which is the contract's 10 s on the worker's
    side.
    """
    files = [nothing_by_default(scheduling) for scheduling in SCHEDULING_VALUES]
    found = {path.removesuffix(f".{ENTRY}") for engine, _ in files for path in paths(engine)}
    found |= {f"engine.{name}" for name in ("type", *(f"vllm.{key}" for key in stock_engine()))}
    found |= {f"model.{name}" for name in stock_file()["model"]}
    found |= {f"model.{path}" for path in paths(adapting_file()["model"])}
    policy = files[0][1]
    only = {"discovery.leaseSeconds"}

    assert found | only == set(fields(WorkerConfig))
    assert set(policy) == {str(field.alias) for field in PolicyConfig.model_fields.values()}


def test_the_file_of_a_stock_engine_loads_in_the_worker(tmp_path: Path) -> None:
    file = stock_file()
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(file))

    config = load_worker_config(tmp_path / "engine.yaml")
    engine = config.engine

    assert (config.model.frontend, config.model.adapters) == ("engine", ("sql",))
    assert (engine.type, engine.block_size, engine.max_model_len) == ("vllm", 32, 512)
    read = msgspec.to_builtins(engine.vllm) | {"command": list(engine.vllm.command)}
    assert read == {**file["engine"]["vllm"], "taggedVersion": ""}


@pytest.mark.parametrize("scheduling", SCHEDULING_VALUES, ids=["threshold", "whole", "sarathi"])
def test_rendered_values_are_the_ones_that_the_worker_reads(
    scheduling: dict[str, Any], tmp_path: Path
) -> None:
    engine, _ = nothing_by_default(scheduling)
    # of a stock engine, and of one without ranks
    engine["model"] |= {"frontend": "pdcluster", "runtimeAdapters": None}
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(engine))
    loaded = load_worker_config(tmp_path / "engine.yaml")

    read_model = msgspec.json.decode(msgspec.json.encode(loaded.model))
    assert read_model == engine["model"]
    others = {"model": None, "engine": None, "discovery": None}
    assert msgspec.to_builtins(loaded) | others == engine | others
    read = msgspec.json.decode(msgspec.json.encode(loaded.engine))  # with lists, not tuples
    for tier in read["kvTiers"] or ():  # a rendered file leaves out the fields of other types
        for name in [name for name, value in tier.items() if value is None]:
            del tier[name]
    assert {name: read[name] for name in engine["engine"]} == engine["engine"]


def test_defaults_are_equal_on_both_sides() -> None:
    """Values that are left out of the engine file mean the same to the worker."""
    engine = EngineSpec().model_dump(by_alias=True, exclude=STOCK)
    assert engine == of_both(EngineConfig())
    model = msgspec.to_builtins(ModelConfig(name="m", path="/m"))
    assert (
        ModelSpec(name="m", path="/m").model_dump(by_alias=True, include=OF_MODEL)
        | {"name": "m", "path": "/m", "adapters": (), "adapterPaths": {}, "runtimeAdapters": None}
        == model
    )
    assert (SITE.etcd_tls, DiscoveryConfig(endpoints=["h:1"]).tls) == ({}, None)
    _, policy = rendered("mixed.yaml", "mixed")
    assert policy == PolicyConfig().model_dump(mode="json", by_alias=True)


def test_worker_records_are_read_by_the_operator() -> None:
    record = records.WorkerRecord(
        engine_id="e1",
        pod="pod-0",
        grpc_address="h:2",
        kv_address="h:3",
        http_address="h:1",
        role="decode",
        pool="cpu",
        state="ready",
    )

    read = etcd.RegisteredWorker(
        "pod-0", "decode", "cpu", "e1", "ready", {"http": "h:1", "grpc": "h:2", "kv": "h:3"}
    )
    assert etcd.parse_record("decode/cpu/pod-0", records.encode_record(record)) == read
    told = msgspec.structs.replace(record, device=DeviceFacts("cpu", "Xeon"))
    assert etcd.parse_record("decode/cpu/pod-0", records.encode_record(told)) == replace(
        read, device=state.WorkerDevice("cpu", "Xeon")
    )
    noted = msgspec.structs.replace(record, device=DeviceFacts("cuda", "B200", "never run"))
    assert etcd.parse_record("decode/cpu/pod-0", records.encode_record(noted)) == replace(
        read, device=state.WorkerDevice("cuda", "B200", "never run")
    )
    unknown = DeviceFacts("cpu", "Xeon", engine_note="vLLM 0.99.1 is not known here")
    told = msgspec.structs.replace(record, device=unknown)
    assert etcd.parse_record("decode/cpu/pod-0", records.encode_record(told)) == replace(
        read, device=state.WorkerDevice("cpu", "Xeon", engine_note=unknown.engine_note)
    )


@pytest.mark.parametrize("device", [None, "cpu", {}, {"kind": None}, ["cpu"]])
def test_device_that_cannot_be_read_hides_no_worker(device: object) -> None:
    content = {
        "engine_id": "e",
        "state": "ready",
        "http_address": "h:1",
        "grpc_address": "h:2",
        "kv_address": "h:3",
        "device": device,
    }
    record = etcd.parse_record("decode/cpu/pod-0", json.dumps(content).encode())

    assert record is not None
    assert record.device is None


def test_exit_statuses_are_equal_on_both_sides() -> None:
    assert (pods.WRONG_SETTING, pods.NO_DEVICE) == (errors.WRONG_SETTING, errors.NO_DEVICE)


def test_what_records_say_of_disaggregation_is_read_whole_by_the_operator() -> None:
    refused = [
        records.RefusedPeer(f"p-{number}", "x" * MAX_REASON) for number in range(MAX_REFUSED)
    ]
    said = records.DisaggregationRecord("tcp", refused, 12, 40, 0.85, 1_200_000_000, "not nixl")

    read = read_disaggregation({"disaggregation": msgspec.to_builtins(said)})

    assert read == WorkerDisaggregation(
        "tcp",
        tuple((peer.pod, peer.reason) for peer in refused),
        *(12, 40, 0.85, 1_200_000_000, "not nixl"),
    )
    assert read_disaggregation({"disaggregation": None}) is None


def paths(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def fields(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        section = next(
            (each for each in get_args(field.type) or (field.type,) if is_section(each)), None
        )
        entry = f"{ENTRY}." if get_origin(field.type) is dict else ""
        if section is not None:
            yield from fields(section, f"{prefix}{field.encode_name}.{entry}")
        else:
            yield f"{prefix}{field.encode_name}"


def test_the_object_takes_the_templates_that_come_with_the_worker() -> None:
    assert tuple(TEMPLATES) == values.TEMPLATES
