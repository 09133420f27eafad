"""Start of the engine process: inspects the model in parallel to the import of torch."""

import contextlib
from pathlib import Path

from pdcluster_worker.config.data_parallel import EngineRank, share_of
from pdcluster_worker.config.worker import load_worker_config
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.model.loading.hf_inspect import start_early
from pdcluster_worker.system.parent_death import die_with_parent


def run(config_path: Path, address: str, place: EngineRank) -> int:
    """Returns the exit status (`processes.engine_process.run`)."""
    die_with_parent()
    inspection = None
    with contextlib.suppress(ConfigError):  # the engine reports it where a user sees it
        inspection = start_early(share_of(load_worker_config(config_path), place.rank))
    from pdcluster_worker.processes import engine_process

    return engine_process.run(config_path, address, place, inspection)
