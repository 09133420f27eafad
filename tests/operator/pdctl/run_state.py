"""The folder of a run of `pdctl up` with a prefill and a decode worker that are ready."""

from pathlib import Path
from typing import Any

from pdctl.local.run_directory import RunDirectory
from tests.operator.played_worker import PlayedWorker


def run_state(
    state_dir: Path, decode: PlayedWorker | None = None, name: str = "chat"
) -> RunDirectory:
    """Make it.  decode: its decode worker; None = there is none at its address."""
    run = RunDirectory.create(state_dir, name)
    files = {}
    for part, content in vars(decode.certificate).items() if decode else ():
        files[part] = str(run.certificates / part)
        Path(files[part]).write_bytes(content)
    grpc = f"127.0.0.1:{decode.port}" if decode else "127.0.0.1:1"
    run.write_state(
        {
            "name": name,
            "revision": "0a1b2c3d",
            "etcd": {"endpoints": ["127.0.0.1:1"], "pid": None},
            "certificates": files,
            "minTransferGBps": None,
            "workers": [_worker("prefill", "127.0.0.1:1"), _worker("decode", grpc)],
        }
    )
    return run


def _worker(role: str, grpc: str) -> dict[str, Any]:
    return {
        "name": f"{role}-0",
        "role": role,
        "pool": "cpu",
        "state": "ready",
        "http": "127.0.0.1:1",
        "grpc": grpc,
        "pid": 7,
        "restarts": 0,
        "log": "/l",
    }
