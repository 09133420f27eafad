"""Refusals of `pdctl up` before it starts anything: workers, address, key, a model by config."""

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdcluster_api.errors import StartError
from pdcluster_schema.load import parse
from pdcluster_schema.model import HuggingFaceSpec
from pdcluster_schema.revision import revision_of
from pdctl.cli.main import app
from pdctl.local.checked_model import checked
from pdctl.local.download import downloaded
from pdctl.local.machine import port_is_free
from pdctl.local.policy import restart_fields
from pdctl.local.run_directory import RunDirectory
from pdctl.local.screen import make_screen
from pdctl.local.up import UpRequest, prepare, read_key, up
from tests.operator.pdctl.stub_model import stub_model
from tests.ports import free_port
from tests.system.ipv6 import has_ipv6


@pytest.fixture
def request_at(tmp_path: Path, document: dict[str, Any]) -> Callable[[int], UpRequest]:
    """A request for a port, with a model folder that is there."""
    document["spec"]["model"]["path"] = str(stub_model(tmp_path / "model"))
    return lambda port: UpRequest(tmp_path / "chat.yaml", parse(document), port, tmp_path / "state")


def test_prepare_keeps_a_port_that_was_given(request_at: Callable[[int], UpRequest]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is taken"):
            prepare(request_at(port))

    assert prepare(request_at(port)).plan.ingress.http_port == port


def test_folders_of_adapters_are_found_and_are_no_edit_of_the_file(
    tmp_path: Path, document: dict[str, Any], request_at: Callable[[int], UpRequest]
) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql/adapter_config.json").write_text("{}")
    document["spec"]["model"]["adapters"] = [{"name": "sql", "path": "sql"}]
    prepared = prepare(request_at(free_port()))
    cluster = prepared.request.cluster
    assert [each.path for each in cluster.spec.model.adapters] == [str(tmp_path / "sql")]
    assert prepared.plan.revision == revision_of(cluster.spec)
    assert restart_fields(prepared.declared, parse(document)) == []


def test_the_name_is_held_before_the_file_of_a_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download, which comes then, can be long."""
    seen = []

    def prepare(request: UpRequest) -> None:
        with RunDirectory.name_taken(tmp_path, "tiny", 1):
            seen.append(request)

    monkeypatch.setattr("pdctl.cli.up.prepare", prepare)
    command = ["up", str(stub_model(tmp_path / "tiny")), "--mixed", "1", "--port", "8123"]
    found = CliRunner().invoke(app, [*command, "--state-dir", str(tmp_path)])

    assert (found.exit_code, seen) == (2, [])
    assert f"tiny runs here already: process {os.getpid()}, port 8123" in found.output
    assert "# Made by pdctl init" in (tmp_path / "tiny/cluster.yaml").read_text()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_port_is_probed_at_its_ipv6_address(request_at: Callable[[int], UpRequest]) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is taken"):
            prepare(replace(request_at(port), host="::1"))
        assert port_is_free(port)

    assert prepare(replace(request_at(port), host="::1")).request.host == "::1"


@pytest.mark.parametrize(("host", "is_refused"), [("192.0.2.7", True), ("127.0.0.1", False)])
def test_a_picker_names_workers_on_loopback(
    host: str, is_refused: bool, document: dict[str, Any], tmp_path: Path
) -> None:
    spec = document["spec"]
    spec["model"]["path"] = str(stub_model(tmp_path / "model"))
    spec["roles"]["picker"] = {"pools": [{"name": "cpu", "gpu": "cpu", "replicas": 1}]}
    spec["service"] = {"endpointPicker": {}}
    found = parse(document)
    request = UpRequest(tmp_path / "chat.yaml", found, free_port(), tmp_path, host, "sesame")

    if not is_refused:
        assert prepare(request).request.host == host
        return
    with pytest.raises(StartError) as refused:
        prepare(request)
    assert str(refused.value) == (
        "--host 192.0.2.7: a picker names 127.0.0.1 to gateways, where nothing would listen; leave "
        "--host out, or give 0.0.0.0"
    )


def test_a_model_that_its_config_shows_not_to_be_served_is_refused(
    request_at: Callable[[int], UpRequest], tmp_path: Path
) -> None:
    request = request_at(free_port())
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(StartError) as refused:
        prepare(request)

    assert str(refused.value) == (
        "model type mamba cannot be served: it has state-space or recurrent layers (model_type) "
        "(only decoder-only models with full or sliding attention can: set model.path to one, or "
        "engine.type: vllm, if vLLM serves this one)"
    )
    assert refused.value.exit_code == 2


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n")

    assert read_key(file) == "sesame"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, " cannot be read: No such file or directory; correct the path"),
        (b"\xff", " cannot be read: it is no text; correct the path"),
        (b"\n", " is empty; write a key into it"),
        (b"a key\n", ": a client can send printable ASCII without spaces alone; give such a key"),
    ],
)
def test_a_file_without_a_key_is_refused(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError) as refused:
        read_key(file)

    assert str(refused.value) == f"--api-key-file: {file}{reason}"
    assert refused.value.exit_code == 2


def test_pdctl_without_workers_names_what_to_install(
    request_at: Callable[[int], UpRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pdcluster_worker", None)

    for start in (
        lambda: prepare(request_at(0)),
        lambda: downloaded(HuggingFaceSpec(repo="owner/name"), tmp_path / "model"),
        lambda: checked(tmp_path),
    ):
        with pytest.raises(StartError, match="without workers; pip install 'pdcluster") as refusal:
            start()
        assert refusal.value.exit_code == 1


@pytest.mark.parametrize(
    ("number", "path", "message"),
    [
        (errno.EACCES, "/opt/etcd", "/opt/etcd: Permission denied"),
        (errno.ENOENT, "state/chat/run-1/x", "state/chat/run-1/x: is gone; leave state as it is"),
        (errno.ENOSPC, "state/x", "state/x: cannot be written: No space left on device; free some"),
    ],
)
def test_a_file_that_fails_while_it_runs_is_named_with_what_failed(
    number: int,
    path: str,
    message: str,
    request_at: Callable[[int], UpRequest],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async def serve(*_: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pdctl.local.up._serve", serve)
    request = replace(request_at(free_port()), state_dir=Path("state"))
    with (
        make_screen(progress=False) as screen,
        pytest.raises(StartError, match=f"^{message}"),
    ):
        up(prepare(request), screen)
