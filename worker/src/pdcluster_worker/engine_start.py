"""The engine process from its first moment: transformers is asked about the model, where that is needed, while torch is imported."""

import contextlib
from pathlib import Path

from pdcluster_worker.config import load_worker_config
from pdcluster_worker.data_parallel import EnginePlace, share_of
from pdcluster_worker.early_end import die_with_parent
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.model.answers import ask_early


def run(config_path: Path, address: str, place: EnginePlace) -> int:
    """Run one engine against this ZMQ address; returns the exit status (`engine_process.run`)."""
    die_with_parent()
    asked = None
    with contextlib.suppress(ConfigError):  # the engine reports it where a user sees it
        asked = ask_early(share_of(load_worker_config(config_path), place.rank))
    from pdcluster_worker import engine_process  # imports torch

    return engine_process.run(config_path, address, place, asked)
