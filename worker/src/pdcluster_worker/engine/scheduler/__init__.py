"""Schedulers: choose the tokens of each request in the next step."""

from collections.abc import Callable, Mapping

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.scheduler.base import Schedule, Scheduler
from pdcluster_worker.engine.scheduler.baselines import (
    Orca,
    PrefillFirst,
    RequestLevel,
    SimpleChunking,
)
from pdcluster_worker.engine.scheduler.continuous import Continuous
from pdcluster_worker.engine.scheduler.sarathi import Sarathi
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerName, wrong_sizes

__all__ = ["SCHEDULERS", "Schedule", "Scheduler", "make_scheduler"]

SCHEDULERS: Mapping[SchedulerName, Callable[[EngineSettings, BlockTables], Scheduler]] = {
    "continuous": Continuous,
    "sarathi": Sarathi,
    "prefill-first": PrefillFirst,
    "orca": Orca,
    "request-level": RequestLevel,
    "simple-chunking": SimpleChunking,
}


def make_scheduler(settings: EngineSettings, tables: BlockTables) -> Scheduler:
    """Raises ConfigError for an unknown name, and for sizes that it cannot work with."""
    own = settings.scheduler
    if own.name not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise ConfigError(f"engine.scheduler: {own.name!r} is no scheduler: use one of {known}")
    if wrong := wrong_sizes(own, settings.max_batched_tokens, settings.max_model_len):
        raise ConfigError(f"engine.scheduler: {wrong}")
    return SCHEDULERS[own.name](settings, tables)
