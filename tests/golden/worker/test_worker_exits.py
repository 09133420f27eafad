"""Exit statuses of the worker's programs, their last words, and pages of a router's process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.golden import records
from tests.golden.worker.transcripts import steady
from tests.ports import free_port
from tests.system.certificates import make_certificates

RECORDS = Path(__file__).parent / "records"
DEADLINE_SECONDS = 60
WORKER, FETCH = "pdcluster_worker", "pdcluster_worker.fetch"
IDENTITY = {"POD_NAME": "w-0", "POD_NAMESPACE": "test", "POD_IP": "127.0.0.1"}


@pytest.fixture(scope="module")
def settings(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engine file of a router; its etcd is away."""
    certificates = make_certificates(tmp_path_factory.mktemp("tls") / "ours")
    return {
        "cluster": "c",
        "revision": "r",
        "role": "router",
        "pool": "p",
        "model": {"name": "tiny", "path": str(model)},
        "discovery": {"endpoints": ["127.0.0.1:1"]},
        "tls": certificates.settings(),
        "listen": {"host": "127.0.0.1", "http": 0, "grpc": 0},
    }


Change = dict[str, Any]
# name -> arguments, changes of the engine file (None = there is no file), of the environment
OUTCOMES: dict[str, tuple[list[str], Change | None, dict[str, str]]] = {
    "help": (["--help"], None, {}),
    "no flag": ([], None, {}),
    "unknown flag": (["--colour"], {}, {}),
    "no engine file": (["--engine-config", "/no"], None, {}),
    "unknown setting": ([], {"colour": "blue"}, {}),
    "setting out of its range": ([], {"listen": {"http": 70000}}, {}),
    "setting of another role": ([], {"gpu": "B200"}, {}),
    "no identity": ([], {}, {"POD_NAME": ""}),
    "no certificates": ([], {"tls": {"ca": "/no", "certificate": "/no", "key": "/no"}}, {}),
    "no model": ([], {"model": {"name": "tiny", "path": "/no"}}, {}),
    "no device": ([], {"role": "decode", "gpu": "B200"}, {}),
}
FETCHES = {
    "fetch without a flag": [],
    "fetch into a place that is no folder": ["--repo", "a/b", "--target", "/dev/null/x"],
    "fetch of a name that is none": ["--repo", "a/b/c", "--target", "/dev/null/x"],
}


def start(program: str, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | IDENTITY | {"COLUMNS": "80", "HF_HUB_OFFLINE": "1"} | environment,
    )


def test_exit_statuses(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    running = {
        name: start(FETCH, arguments, PDCLUSTER_TOKEN_SECRET="hub")
        for name, arguments in FETCHES.items()
    }
    for name, (arguments, change, environment) in OUTCOMES.items():
        files: list[str] = []
        if change is not None:
            file = tmp_path / f"{name}.yaml"
            file.write_text(json.dumps(settings | change))
            files = ["--engine-config", str(file)]
        running[name] = start(WORKER, [*files, *arguments], **environment)
    parts = []
    for name, process in running.items():
        said = process.communicate(timeout=DEADLINE_SECONDS)[0].rstrip("\n")
        words = said if name == "help" else said.splitlines()[-1]
        parts.append(f"{name}: {process.returncode}\n{words}\n")
    text = "\n".join(parts).replace(str(tmp_path), "<folder>").replace(str(model), "<model>")
    records.check(RECORDS / "exit_statuses.txt", text)


def test_router_serves_pages_and_ends_at_sigterm(settings: dict[str, Any], tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "router.yaml"
    file.write_text(json.dumps(settings | {"listen": settings["listen"] | {"http": port}}))
    process = start(WORKER, ["--engine-config", str(file)])
    try:
        url = f"http://127.0.0.1:{port}"
        pages = {path: page(url + path) for path in ("/version", "/v1/models")}
        pages |= {path: page(url + path)[:3] for path in ("/health", "/ready")}
        names = [line for line in page(f"{url}/metrics").splitlines() if line.startswith("# TYPE")]
        process.send_signal(signal.SIGTERM)
        status = process.wait(DEADLINE_SECONDS)
    finally:
        process.kill()
        process.communicate()
    lines = [f"GET {path}\n{text}\n" for path, text in pages.items()]
    names = sorted(name for name in names if "_created" not in name)
    text = "\n".join([*lines, *names, "", f"SIGTERM: {status}", ""])
    records.check(RECORDS / "router.txt", steady(text))


def page(url: str) -> str:
    """Status and body, once the server listens."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            answer = httpx.get(url, trust_env=False)
            return f"{answer.status_code} {answer.text}"
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the router does not listen"
            time.sleep(0.02)
