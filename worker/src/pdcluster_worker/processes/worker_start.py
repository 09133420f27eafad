"""Start of a worker: engine processes start before this one imports its server, in parallel."""

import os
from importlib.util import find_spec
from pathlib import Path

import uvloop

from pdcluster_schema.ports import join_address
from pdcluster_schema.sections import ENGINELESS
from pdcluster_worker.config.worker import (
    Identity,
    WorkerConfig,
    check_gpu,
    has_board,
    load_worker_config,
    requested_device,
    thread_share,
)
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.processes.dp_board import create_board
from pdcluster_worker.serving.engines.child import EngineChild
from pdcluster_worker.serving.engines.group import Child, EngineGroup
from pdcluster_worker.serving.engines.stock_child import StockServer
from pdcluster_worker.system.cpu_cores import wait_environment


def run(config_path: Path, policy_path: Path | None) -> int:
    """Returns the exit status.  Raises ConfigError, DeviceError, ModelError."""
    config = load_worker_config(config_path)
    if config.role in ENGINELESS:
        from pdcluster_worker.processes import router_process

        return uvloop.run(router_process.run(config, Identity.from_env(), policy_path))
    if config.engine.type == "pdcluster":
        _check_image()
        # refuse before this worker takes part in choosing the revision's dtype
        check_gpu(requested_device(config))
    identity = Identity.from_env()
    return uvloop.run(_run(config_path, policy_path, config, identity))


def _check_image() -> None:
    """Refuse our engine in an image without torch."""
    if find_spec("torch") is None:
        raise ConfigError(
            "this image holds no engine: use the variant cpu or cuda of the worker's image, or set "
            "engine.type: vllm or sglang"
        )


async def _run(
    config_path: Path, policy_path: Path | None, config: WorkerConfig, identity: Identity
) -> int:
    group = _engines(config_path, config, identity)
    try:
        await group.start()
        from pdcluster_worker.processes import server_process

        return await server_process.run(config, identity, policy_path, group)
    finally:
        await group.stop()


def _engines(config_path: Path, config: WorkerConfig, identity: Identity) -> EngineGroup:
    """Not started yet."""
    engine = config.engine
    board = create_board(engine.data_parallel_size) if has_board(engine) else None

    server = StockServer(config) if engine.is_stock else None

    def new_child(rank: int) -> Child:
        if server is not None:
            return server.ranks[rank]
        environment = wait_environment(thread_share(engine), os.environ, engine.data_parallel_size)
        return EngineChild(config_path, environment, rank, board)

    return EngineGroup(
        engine.data_parallel_size,
        new_child,
        lambda port: join_address(identity.address, port),
        invariant=engine.batch_invariant,
    )
