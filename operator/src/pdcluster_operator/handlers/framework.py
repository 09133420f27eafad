"""Run kopf: its settings, its registry and a memory that keeps nothing.

Everything that it could write is off: we register low-level handlers only, the
cache and the back-off are ours, and the Lease stands before it starts.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kopf
from kopf._cogs.structs.references import Insights
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from pdcluster_api.apiserver.kinds import PDCLUSTER, Kind
from pdcluster_api.schema import labels
from pdcluster_operator.handlers.watch import Watch, register
from pdcluster_operator.informer.listing import SELECTOR, WATCHED

LIST_CHUNK = 100
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchSettings:
    """namespaces: empty = all; in_pod: log in as the pod's ServiceAccount, else by kubeconfig;
    kinds: watched.
    """

    namespaces: Sequence[str] = ()
    in_pod: bool = True
    kinds: Sequence[Kind] = WATCHED


class NoMemories(ResourceMemories):
    """Keeps nothing: kopf stores some kilobytes for every object, for handlers that we do not
    use.
    """

    async def recall(self, raw_body: Any, **_: Any) -> ResourceMemory:
        """A fresh record."""
        return ResourceMemory()


class NoDifferences(kopf.DiffBaseStorage):
    """Makes no digest of an object: kopf would build one at every event, for change handlers."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        """Nothing of it."""
        return {}

    def fetch(self, *, body: Any) -> Any:
        """Nothing was stored."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing."""


def make_settings(kinds: Iterable[Kind]) -> kopf.OperatorSettings:
    """Watches that end in time and are known to move, short requests, no posting, no peering."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout, settings.watching.client_timeout = 240, 270
    settings.watching.connect_timeout, settings.watching.reconnect_backoff = 5, 1.0
    settings.watching.inactivity_timeout = 70  # the API server sends a bookmark every minute
    settings.watching.chunk_size = LIST_CHUNK
    for kind in kinds:
        if kind != PDCLUSTER:
            settings.watching.label_selectors[kind.api_version, kind.plural] = SELECTOR
    settings.networking.request_timeout, settings.networking.connect_timeout = 30, 5
    settings.networking.error_backoffs = (1, 2, 4, 8, 16)
    settings.queueing.idle_timeout = 0.1  # each object that had an event holds a task and its body for so long
    settings.queueing.exit_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 30
    settings.execution.max_workers = 1  # every handler is async
    settings.execution.default_backoff = 10
    settings.posting.enabled = False
    settings.posting.level = logging.WARNING
    settings.peering.standalone = True
    settings.persistence.finalizer = f"{labels.GROUP}/never-added"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=labels.GROUP)
    settings.persistence.diffbase_storage = NoDifferences()
    return settings


def make_registry(*, in_pod: bool) -> kopf.OperatorRegistry:
    """A registry without kopf's default handlers.  It logs in again when the API server refuses."""
    registry = kopf.OperatorRegistry()
    login = kopf.login_with_service_account if in_pod else kopf.login_with_kubeconfig
    kopf.on.login(registry=registry, errors=kopf.ErrorsMode.TEMPORARY, backoff=5)(login)
    return registry


async def run_watches(
    settings: WatchSettings, watch: Watch, stop: asyncio.Event, started: asyncio.Event, on_kinds: Callable[[], None]
) -> None:
    """Watch everything until `stop`; raises, or ends early, when a watch ends for good.

    started:  set when kopf has put its own signal handlers in
    on_kinds: called when kinds of objects have come or gone
    """
    insights = Insights()
    kinds = asyncio.create_task(_report_kinds(insights, on_kinds), name="kinds")
    kinds.add_done_callback(partial(_end_too, stop))
    registry = make_registry(in_pod=settings.in_pod)
    register(registry, settings.kinds, watch)
    try:
        await kopf.operator(
            registry=registry,
            settings=make_settings(settings.kinds),
            memories=NoMemories(),
            insights=insights,
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
            ready_flag=started,
        )
    finally:
        kinds.cancel()


def _end_too(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """End the watches when a task ends by itself, and these the process."""
    if not task.cancelled():
        logger.error("ended unexpectedly task=%s", task.get_name(), exc_info=task.exception())
        stop.set()


async def _report_kinds(insights: Insights, on_kinds: Callable[[], None]) -> None:
    known: set[Any] = set()
    async with insights.revised:
        while True:
            await insights.revised.wait()
            if known != insights.watched_resources:
                known = set(insights.watched_resources)
                on_kinds()
