"""The pod of a worker with a stock engine: two containers, and what each of them gets."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pdcluster_api.manifests.objects import Manifest
from pdcluster_api.manifests.vllm import GPU_REPORT
from pdcluster_schema.ports import HTTP_PORT
from tests.operator.pdcluster_api.manifests.rendering import (
    by_name,
    engine_of,
    pod_of,
)
from tests.schema.object_cases import VOLUME, Change, at, both, vllm


def sidecar_of(*changes: Change) -> Manifest:
    containers = pod_of(*(changes or (vllm(),)))["spec"]["initContainers"]
    return by_name(containers)["engine"]


def test_image_is_stock_and_pulled_as_ours_is() -> None:
    pulled = at("spec.image", {"pullPolicy": "Never", "pullSecrets": ["regcred"]})
    pod = pod_of(vllm(), pulled)["spec"]
    engine = by_name(pod["initContainers"])["engine"]

    assert (engine["image"], engine["imagePullPolicy"]) == ("vllm/vllm-openai:v0.32.0", "Never")
    assert pod["imagePullSecrets"] == [{"name": "regcred"}]


class _Server(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        assert self.path == "/engine/health"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"3 requests wait and no token came for 60 s")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Server) as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def probe(
    port: int, *changes: Change, report: Path | None = None, path: str = "/nowhere"
) -> "subprocess.CompletedProcess[str]":
    """report: file in the place of the pod's; path: where its programs are."""
    command = sidecar_of(vllm(), *changes)["livenessProbe"]["exec"]["command"]
    script = command[-1].replace(f":{HTTP_PORT}/", f":{port}/")
    assert command[:2] == ["python3", "-c"]
    if report is not None:
        script = script.replace(GPU_REPORT, str(report))
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": path},
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (404, 0), (500, 0)])
def test_probe_fails_where_the_server_says_that_the_engine_is_stalled(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    monkeypatch.setattr(_Server, "status", status)
    ended = probe(server.server_port)

    assert ended.returncode == code
    assert ("no token came" in ended.stderr) is (code == 1)


def test_probe_passes_while_the_server_does_not_answer(server: HTTPServer) -> None:
    port = server.server_port
    server.shutdown()
    server.server_close()

    assert probe(port).returncode == 0


def nvidia_smi(folder: Path, script: str) -> str:
    """The PATH of a container with that program in place of `nvidia-smi`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/bin:/usr/bin"


GPUS = "NVIDIA B200, 183359, 165000, 42, 17"
ONE_GPU = at("spec.roles.decode.pools.0.gpu", "B200")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f'test "$2" = --format=csv,noheader,nounits && echo "{GPUS}"', f"{GPUS}\n"),
        ("echo No devices were found; exit 6", "No devices were found\n"),
        (r"printf '\377 GPU'", r"\xff GPU"),
        ("exec sleep 60", "no answer within 3 s"),
    ],
    ids=["gpus", "none", "no text", "hangs"],
)
def test_probe_leaves_what_nvidia_smi_says_for_the_server(
    server: HTTPServer, tmp_path: Path, script: str, said: str
) -> None:
    report = tmp_path / "report"
    path = nvidia_smi(tmp_path, script)

    assert probe(server.server_port, ONE_GPU, report=report, path=path).returncode == 0
    assert report.read_text() == said


def test_probe_says_that_there_is_no_nvidia_smi(server: HTTPServer, tmp_path: Path) -> None:
    report = tmp_path / "report"
    probe(server.server_port, ONE_GPU, report=report)

    assert "nvidia-smi" in report.read_text()


def test_probe_needs_no_folder_for_its_report(
    server: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "none" / "report"
    assert probe(server.server_port, ONE_GPU, report=nowhere).returncode == 0
    monkeypatch.setattr(_Server, "status", 503)
    assert probe(server.server_port, ONE_GPU, report=nowhere).returncode == 1


def test_engine_of_a_pool_without_accelerators_reports_none() -> None:
    assert "nvidia-smi" not in sidecar_of()["livenessProbe"]["exec"]["command"][-1]


def test_adapters_are_loaded_with_the_model_and_known_to_every_worker() -> None:
    adapters = [{"name": "sql", "path": "lora/sql"}, {"name": "fr", "path": "lora/fr"}]
    change = both(vllm(), at("spec.model", {**VOLUME, "adapters": adapters}))
    command = sidecar_of(change)["command"]
    first = command.index("--lora-modules")

    assert command[first - 3 : first] == ["--enable-lora", "--max-loras", "2"]
    own = both(change, at("spec.engine.args", ["--max-loras=1"]))
    assert "--max-loras" not in sidecar_of(own)["command"]
    assert [json.loads(text) for text in command[first + 1 : first + 3]] == [
        {"name": name, "path": f"/models/lora/{name}", "base_model_name": VOLUME["name"]}
        for name in ("sql", "fr")
    ]
    assert engine_of(change)["model"]["adapters"] == ["sql", "fr"]
    assert "adapterPaths" not in engine_of(change)["model"]


def test_engines_of_ours_may_load_adapters_below_one_folder_while_they_run() -> None:
    allowed = {"path": "lora", "memory": "2Gi"}
    change = both(
        at("spec.model", {**VOLUME, "runtimeAdapters": allowed}),
        at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]}),
    )
    seen = {"path": "/models/lora", "memory": 2 << 30}
    models = {
        role: engine_of(change, role=role)["model"] for role in ("prefill", "decode", "router")
    }

    assert models["prefill"]["runtimeAdapters"] == models["decode"]["runtimeAdapters"] == seen
    assert "runtimeAdapters" not in models["router"]


def test_workers_that_load_adapters_for_clients_ask_for_their_keys() -> None:
    keys = at("spec.service", {"apiKeySecret": "keys"})
    allowed = at("spec.model.runtimeAdapters", {"path": "/lora", "memory": "2Gi"})

    def has_keys(*changes: Change) -> bool:
        listen = engine_of(*changes, role="prefill")["listen"]
        return "apiKeys" in listen

    assert not has_keys(keys)
    assert has_keys(keys, allowed)
