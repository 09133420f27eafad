"""One run of one worker from its first moment: the engine process is started before this one has imported what it serves with.

Both import for a second or more, and so do it side by side.  What is wrong with the
settings is said as before, by either process; the engine's end comes with this one's.
"""

import os
from pathlib import Path

import uvloop

from pdcluster_worker.asked_device import asked_device, check_gpu
from pdcluster_worker.config import Identity, WorkerConfig, load_worker_config
from pdcluster_worker.dispatch.engine_child import EngineChild
from pdcluster_worker.waiting import wait_environment


def run(config_path: Path, policy_path: Path | None) -> int:
    """Run one worker until it has drained or its engine has died; returns the exit status.  Raises ConfigError, DeviceError, ModelError."""
    config = load_worker_config(config_path)
    check_gpu(asked_device(config))  # a worker that cannot compute has no say in the revision's dtype
    identity = Identity.from_env()
    return uvloop.run(_run(config_path, policy_path, config, identity))


async def _run(config_path: Path, policy_path: Path | None, config: WorkerConfig, identity: Identity) -> int:
    engine = EngineChild(config_path, wait_environment(config.engine.threads, os.environ))
    try:
        await engine.start()
        from pdcluster_worker import server_process  # FastAPI, gRPC and etcd's client: half a second or more

        return await server_process.run(config, identity, policy_path, engine)
    finally:
        await engine.stop()
