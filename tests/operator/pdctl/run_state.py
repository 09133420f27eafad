"""The folder of a run of `pdctl up` with a prefill and a decode worker that are ready."""

from pathlib import Path
from typing import Any

from pdctl.local.run_directory import RunDirectory


def run_state(state_dir: Path, port: int, name: str = "chat") -> RunDirectory:
    """Make it.  port: of the decode worker's HTTP listener"""
    run = RunDirectory.create(state_dir, name)
    key = run.certificates / "worker.key"
    key.write_bytes(b"private")
    run.write_state(
        {
            "name": name,
            "revision": "0a1b2c3d",
            "etcd": {"endpoints": ["127.0.0.1:1"], "pid": None},
            "certificates": {"key": str(key)},
            "minTransferGBps": None,
            "workers": [_worker("prefill", None), _worker("decode", f"127.0.0.1:{port}")],
        }
    )
    return run


def _worker(role: str, http: str | None) -> dict[str, Any]:
    return {
        "name": f"{role}-0",
        "role": role,
        "pool": "cpu",
        "state": "ready",
        "http": http or "127.0.0.1:1",
        "pid": 7,
        "restarts": 0,
        "log": "/l",
    }
