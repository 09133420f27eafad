"""The schedulers by name."""

from collections.abc import Callable, Mapping

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.scheduler.continuous import Continuous
from pdcluster_worker.engine.scheduler.orca import Orca
from pdcluster_worker.engine.scheduler.prefill_first import PrefillFirst
from pdcluster_worker.engine.scheduler.protocol import Scheduler
from pdcluster_worker.engine.scheduler.request_level import RequestLevel
from pdcluster_worker.engine.scheduler.sarathi import Sarathi
from pdcluster_worker.engine.scheduler.simple_chunking import SimpleChunking
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerName, wrong_sizes

SCHEDULERS: Mapping[SchedulerName, Callable[[EngineSettings, BlockTables], Scheduler]] = {
    "continuous": Continuous,
    "sarathi": Sarathi,
    "prefill-first": PrefillFirst,
    "orca": Orca,
    "request-level": RequestLevel,
    "simple-chunking": SimpleChunking,
}


def make_scheduler(settings: EngineSettings, tables: BlockTables) -> Scheduler:
    """The scheduler that the settings name.

    Raises ConfigError for an unknown name, and for sizes that it cannot work with.
    """
    own = settings.scheduler
    if own.name not in SCHEDULERS:
        known = ", ".join(SCHEDULERS)
        raise ConfigError(f"engine.scheduler: {own.name!r} is no scheduler: use one of {known}")
    if wrong := wrong_sizes(own, settings.max_batched_tokens, settings.max_model_len):
        raise ConfigError(f"engine.scheduler: {wrong}")
    return SCHEDULERS[own.name](settings, tables)
