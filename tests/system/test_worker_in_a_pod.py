"""A worker as a pod runs it: a user without a name or rights, nothing writable but a temporary
folder, keys from a Secret.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.system.certificates import Certificates
from tests.system.client import MODEL, Json, answer_of, body
from tests.system.prompts import Prompts
from tests.system.waiting import wait_for
from tests.system.worker_process import END_SECONDS, READY_SECONDS

USER = 65532
CAPS = "-all,+dac_read_search"

# A mount namespace of its own: all is read-only but $1/tmp; then the rights are dropped for good.
# All but one: reading what only root may read here, such as a Python that is installed in root's
# home.
CONFINED = f"""
set -e
folder=$1; shift
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs "$folder/tmp"
mount -o remount,bind,ro /
exec setpriv --reuid {USER} --regid {USER} --clear-groups --no-new-privs \\
    --inh-caps={CAPS} --ambient-caps={CAPS} --bounding-set={CAPS} "$@"
"""

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+ |[IWE]\d{4} \d\d:\d\d:\d\d")
"""A record of ours, or of gRPC's core."""


def can_confine() -> bool:
    """Mounting takes root, and a container may forbid it even then."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    attempt = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        "mount --make-rprivate / && mount -o remount,bind,ro /",
    ]
    return subprocess.run(attempt, capture_output=True, check=False).returncode == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the only place that it may write to."""
    (tmp_path / "tmp").mkdir()
    return tmp_path


def write_files(folder: Path, model: Path, certificates: Certificates, endpoint: str) -> Path:
    """All that a pod would have mounted; returns the engine file."""
    (folder / "keys").mkdir()
    for client in ("client", "other"):
        (folder / "keys" / client).write_text(f"sk-{client}")
    settings = {
        "cluster": "pod",
        "revision": "r1",
        "role": "mixed",
        "pool": "cpu",
        "model": {"name": MODEL, "path": str(model), "dtype": "float32"},
        "discovery": {"endpoints": [endpoint], "leaseSeconds": 3},
        "tls": certificates.settings(),
        "engine": {"maxBatchedTokens": 64, "maxSequences": 32, "numBlocks": 128},
        "listen": {
            "host": "127.0.0.1",
            "http": 0,
            "grpc": 0,
            "kv": 0,
            "apiKeys": str(folder / "keys"),
        },
    }
    engine = folder / "engine.yaml"
    engine.write_text(json.dumps(settings))
    return engine


@pytest.mark.skipif(not can_confine(), reason="needs root and the right to mount")
def test_a_worker_needs_no_rights_and_writes_only_into_tmp(
    folder, new_cluster, tiny_model, certificates, prompts
):
    cluster = new_cluster("pod")
    engine = write_files(folder, tiny_model, certificates, cluster.etcd.endpoint)
    tmp = str(folder / "tmp")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": tmp,
        "TMPDIR": tmp,
        "POD_NAME": "pod-0",
        "POD_NAMESPACE": "test",
        "POD_IP": "127.0.0.1",
    }
    worker = [sys.executable, "-m", "pdcluster_worker", "--engine-config", str(engine)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", CONFINED, "sh", str(folder), *worker],
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        check(process, folder, cluster.record, prompts)
    finally:
        process.kill()
        process.wait()


def check(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    record: Callable[[str], Json | None],
    prompts: Prompts,
) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        found = record("pod-0")
        return bool(found and found["engine_id"])

    wait_for(is_ready, READY_SECONDS, lambda: (folder / "log").read_text())
    address = (record("pod-0") or {})["http_address"]
    assert f"\t{USER}\t" in Path(f"/proc/{process.pid}/status").read_text()
    with httpx.Client(base_url=f"http://{address}", timeout=60, trust_env=False) as http:
        wait_for(lambda: http.get("/ready").status_code == httpx.codes.OK, READY_SECONDS, "ready")
        assert (
            http.post("/v1/completions", json=body(prompts(20))).status_code
            == httpx.codes.UNAUTHORIZED
        )
        request = body(prompts(20))
        keys = ("sk-client", "sk-client", "sk-other")
        answers = [
            answer_of(
                http.post(
                    "/v1/completions", json=request, headers={"authorization": f"Bearer {key}"}
                )
            )
            for key in keys
        ]
        assert len(answers[0].tokens) == 8
        assert [answer.cached_tokens for answer in answers] == [0, 16, 0]
    process.terminate()
    assert process.wait(END_SECONDS) == 0
    lines = (folder / "log").read_text().splitlines()
    assert [line for line in lines if not LINE.match(line)] == []
