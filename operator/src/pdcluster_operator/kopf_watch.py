"""Run kopf with all that it could write turned off: cache, back-off and Lease are ours."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kopf
from kopf._cogs.clients import api
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from pdcluster_api.apiserver.kinds import PDCLUSTER, Key
from pdcluster_operator.informer.cache import Cache
from pdcluster_operator.informer.watches import SERVER_SECONDS, SILENCE_SECONDS
from pdcluster_schema import labels
from pdcluster_schema.quick_json import decoded


class NoMemories(ResourceMemories):
    """Keeps nothing: kopf stores some kilobytes per object for handlers that we do not use."""

    async def recall(self, raw_body: Any, **_: Any) -> ResourceMemory:
        return ResourceMemory()


def read_json_of_any_depth() -> None:
    """Let kopf read JSON as we do: by its own reader an object of some thousand levels, which any
    user may make, ends the operator.
    """
    reader = SimpleNamespace(loads=lambda line: decoded(line.encode()))
    vars(api).update(json=reader, get=_get)


async def _get(url: str, **options: Any) -> Any:
    response = await api.request(method="get", url=url, **options)
    async with response:
        return decoded(await response.read())


LIST_CHUNK = 20  # PDClusters of a page: kopf parses a page as a whole, and one may have 1.5 MiB


@dataclass(frozen=True)
class WatchSettings:
    namespaces: Sequence[str] = ()  # empty = all
    in_pod: bool = True  # log in as the pod's ServiceAccount, else by kubeconfig
    # time without an event or a bookmark after which a watch is opened again
    silence_seconds: float = SILENCE_SECONDS


@dataclass(frozen=True)
class Watch:
    """listed: called when the watch listed again, and may have missed deletions."""

    cache: Cache
    add: Callable[[Key], None]
    listed: Callable[[], None]

    async def on_event(self, *, event: kopf.RawEvent, **_: Any) -> None:
        if event["type"] is None:
            self.listed()
        learn = self.cache.remove if event["type"] == "DELETED" else self.cache.put
        key = learn(PDCLUSTER.name, event["object"])
        if key is not None:
            self.add(key)


def register(registry: kopf.OperatorRegistry, watch: Watch) -> None:
    kopf.on.event(PDCLUSTER.api_version, PDCLUSTER.plural, registry=registry, id=PDCLUSTER.plural)(
        watch.on_event
    )


class NoDifferences(kopf.DiffBaseStorage):
    """Makes no digest of an object: kopf would build one at every event, for change handlers."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing."""


def make_settings(watching: WatchSettings) -> kopf.OperatorSettings:
    """Watches that end in time and are known to move, short requests, no posting, no peering.
    Where namespaces are given the operator has no right to list them, nor the CRDs: kopf would ask
    for half a minute before the first watch.
    """
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = bool(watching.namespaces)
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.client_timeout = SERVER_SECONDS + 30
    settings.watching.connect_timeout, settings.watching.reconnect_backoff = 5, 1.0
    settings.watching.inactivity_timeout = watching.silence_seconds
    settings.watching.chunk_size = LIST_CHUNK
    settings.networking.request_timeout, settings.networking.connect_timeout = 30, 5
    settings.networking.error_backoffs = (1, 2, 4, 8, 16)
    # each object that had an event holds a task and its body for so long
    settings.queueing.idle_timeout = 0.1
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
    settings: WatchSettings, watch: Watch, stop: asyncio.Event, started: asyncio.Event
) -> None:
    """Watch the PDClusters until `stop`; raises, or ends early, when a watch ends for good.
    started: set when kopf has put its own signal handlers in
    """
    read_json_of_any_depth()
    registry = make_registry(in_pod=settings.in_pod)
    register(registry, watch)
    await kopf.operator(
        registry=registry,
        settings=make_settings(settings),
        memories=NoMemories(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        stop_flag=stop,
        ready_flag=started,
    )
