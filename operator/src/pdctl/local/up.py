"""`pdctl up`: a PDCluster as processes of this machine, from the checked file to the last process's
end.

The order is: check what needs no process, etcd, workers, ready, serve until a
signal, drain, etcd.  Whatever goes wrong on the way, what was started is ended
before the error is shown.
"""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_api.discovery.etcd import check_reachable
from pdcluster_api.discovery.keys import records_prefix, workers_prefix
from pdcluster_api.errors import EtcdUnreachableError, StartError
from pdcluster_api.schema.pdcluster import PDCluster
from pdctl.local.certificates import make_certificates
from pdctl.local.etcd import etcd_launch, find_etcd, wait_until_reachable
from pdctl.local.idle import idle_remarks
from pdctl.local.keeper import Keeper
from pdctl.local.machine import available_cores, free_port, port_is_free
from pdctl.local.model import FoundModel, find_model
from pdctl.local.plan import LocalPlan, plan_local
from pdctl.local.policy import PolicyWatcher
from pdctl.local.remarks import watch_remarks
from pdctl.local.rows import Row
from pdctl.local.run_directory import RunDirectory
from pdctl.local.screen import Screen
from pdctl.local.site import Site, write_policy, write_process
from pdctl.local.state import make_state
from pdctl.local.stock_engine import with_programs
from pdctl.local.supervisor import CONFIGURATION_ERROR, Supervisor
from pdctl.local.together import TogetherNews
from pdctl.local.verified import watch_transfers
from pdctl.local.watcher import Watcher

_ETCD_END_SECONDS = 5.0  # it only closes files; later it is killed
WORKER_COMMAND = (sys.executable, "-m", "pdcluster_worker")


@dataclass(frozen=True)
class UpRequest:
    """Options of a run.

    source:     the file that `cluster` came from
    port:       0 = any free one
    model_path: the model's folder, whatever the object says; None = see `local.model`
    vllm:       program of stock engines, likewise; None = see `local.stock_engine`
    """

    source: Path
    cluster: PDCluster
    port: int
    state_dir: Path
    model_path: Path | None = None
    vllm: Path | None = None
    command: tuple[str, ...] = WORKER_COMMAND


@dataclass(frozen=True)
class Prepared:
    """Results of the checks before anything starts."""

    request: UpRequest
    plan: LocalPlan
    model: FoundModel


@dataclass(frozen=True)
class _Crew:
    """Parts that work while the cluster runs."""

    run: RunDirectory
    supervisor: Supervisor
    watcher: Watcher
    policy: PolicyWatcher


@dataclass(frozen=True)
class _Signals:
    """stop: end in good order; hurry: now."""

    stop: asyncio.Event
    hurry: asyncio.Event


def up(request: UpRequest, screen: Screen) -> None:
    """Run a cluster until SIGINT or SIGTERM.  Raises InvalidObjectError or StartError."""
    prepared = prepare(request)
    name, port = request.cluster.metadata.name, prepared.plan.ingress.http_port
    with RunDirectory.name_taken(request.state_dir, name, port):
        asyncio.run(_serve(prepared, screen))


def prepare(request: UpRequest) -> Prepared:
    """Check all that needs no process.  Raises InvalidObjectError or StartError.

    Port 0 becomes a port here, once: a worker that is restarted then serves
    again at the address that was announced.
    """
    port = request.port or free_port()
    plan = plan_local(request.cluster, cores=available_cores(), port=port)
    model = find_model(request.cluster, request.source, request.model_path)
    plan = with_programs(plan, request.source, request.vllm)
    _check_port(port)
    return Prepared(request, plan, model)


def _check_port(port: int) -> None:
    try:
        free = port_is_free(port)
    except OSError as e:
        raise StartError(
            f"port {port} cannot be used ({e.strerror}); choose another with --port or "
            "PDCLUSTER_PORT",
            exit_code=2,
        ) from e
    if not free:
        raise StartError(
            f"port {port} is taken; choose another with --port or PDCLUSTER_PORT", exit_code=2
        )


async def _serve(prepared: Prepared, screen: Screen) -> None:
    signals = _listen_to_signals()
    cluster, plan = prepared.request.cluster, prepared.plan
    name, namespace = cluster.metadata.name, cluster.metadata.namespace
    run = RunDirectory.create(prepared.request.state_dir, name)
    screen.say(
        f"{name}: starting revision {plan.revision}, one process per worker: "
        f"{len(plan.processes)}; logs in {run.logs}"
    )
    for line in (
        f"model {prepared.model.path}, from {prepared.model.origin}",
        *idle_remarks(cluster),
    ):
        screen.say(line)
    async with _etcd(cluster, run, screen) as (endpoints, etcd):
        site = Site(
            run,
            prepared.model.path,
            endpoints,
            make_certificates(run.certificates),
            prepared.request.command,
        )
        write_policy(cluster, site)
        supervisor = Supervisor(
            [write_process(cluster, process, site) for process in plan.processes], screen.say
        )

        together = TogetherNews(cluster, screen.say)

        def changed(rows: Sequence[Row]) -> None:
            pid = etcd.pid if etcd else None
            run.write_state(make_state(policy.cluster, plan, site, pid, rows))
            screen.show(rows)
            together.show(rows)

        watcher = Watcher(endpoints, workers_prefix(namespace, name, plan.revision), changed)
        policy = PolicyWatcher(
            prepared.request.source, cluster, run.policy, screen.say, taken=watcher.report
        )
        await _prime(watcher)
        await _run_workers(prepared, _Crew(run, supervisor, watcher, policy), signals, screen)
    screen.say("stopped")


async def _run_workers(prepared: Prepared, crew: _Crew, signals: _Signals, screen: Screen) -> None:
    """Start the workers, announce them, serve until stopped, drain."""
    workers = [
        (process.role, process.pool.name, keeper)
        for process, keeper in zip(prepared.plan.processes, crew.supervisor.keepers, strict=True)
    ]
    crew.supervisor.start()
    background = {
        asyncio.create_task(crew.watcher.run(workers)),
        asyncio.create_task(crew.policy.run()),
        asyncio.create_task(watch_transfers(crew.run, crew.watcher.all_ready, screen.say)),
    }
    remarks = asyncio.create_task(watch_remarks(crew.run, crew.watcher.all_ready, screen.say))
    stop = asyncio.create_task(signals.stop.wait())
    given_up = asyncio.create_task(crew.supervisor.given_up())
    ready = asyncio.create_task(crew.watcher.all_ready.wait())
    try:
        await _first_of({stop, given_up, ready} | background)
        if given_up.done():
            raise _start_error(given_up)
        if ready.done() and not stop.done():
            screen.say(
                _announcement(
                    prepared.request.cluster, crew.watcher.http_address(prepared.plan.ingress.name)
                )
            )
            await _first_of({stop} | background)
        screen.say("draining; once more ends it at once")
    finally:
        await crew.supervisor.stop(signals.hurry)
        crew.watcher.look(workers)
        tasks = (*background, remarks, stop, given_up, ready)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prime(watcher: Watcher) -> None:
    try:
        await watcher.prime()
    except EtcdUnreachableError as e:
        raise StartError(
            f"{e}; it answered a moment ago: start it again and try once more", exit_code=1
        ) from e


async def _first_of(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait for one to end.  Raises its error, if that is how it ended."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def _start_error(given_up: asyncio.Task[Keeper | None]) -> StartError:
    keeper = given_up.result()
    if keeper is None:
        return StartError("every worker was stopped", exit_code=1)
    return StartError(
        f"{keeper.launch.name}: {keeper.last_error()} (log {keeper.launch.log})",
        exit_code=CONFIGURATION_ERROR,
    )


def _announcement(cluster: PDCluster, address: str) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": cluster.spec.model.name, "messages": question, "temperature": 0})
    url = f"http://{address}/v1"
    return (
        f"ready: {url}\n\n  curl {url}/chat/completions -H 'Content-Type: application/json' \\\n   "
        f" -d '{body}'\n\nCtrl-C to stop"
    )


def _listen_to_signals() -> _Signals:
    """SIGINT and SIGTERM: the first stops, any later one hurries."""
    signals = _Signals(asyncio.Event(), asyncio.Event())

    def on_signal() -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return signals


@contextlib.asynccontextmanager
async def _etcd(
    cluster: PDCluster, run: RunDirectory, screen: Screen
) -> AsyncIterator[tuple[tuple[str, ...], Keeper | None]]:
    """Endpoints to use, and the keeper of our own etcd if none were given.

    Raises StartError when they do not answer.
    """
    given = cluster.spec.discovery.etcd.endpoints
    if given:
        try:
            await check_reachable(
                given, records_prefix(cluster.metadata.namespace, cluster.metadata.name)
            )
        except EtcdUnreachableError as e:
            raise StartError(
                f"spec.discovery.etcd.endpoints: {e} ({e.reason}); start it, correct the address, "
                "or leave the field out for one of our own",
                exit_code=1,
            ) from e
        yield given, None
        return
    launch, endpoint = etcd_launch(find_etcd(), run.etcd_data, run.logs / "etcd.log")
    keeper = Keeper(launch, screen.say)
    task = asyncio.create_task(keeper.run())
    try:
        await wait_until_reachable(endpoint, launch.log)
        yield (endpoint,), keeper
    finally:
        keeper.stop()
        await asyncio.wait({task}, timeout=_ETCD_END_SECONDS)
        keeper.kill()
        await asyncio.gather(task, return_exceptions=True)
