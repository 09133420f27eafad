"""`pdctl up`: runs a PDCluster as processes of this machine.

In order: checks without processes, etcd, workers, ready, serve until a signal, drain, stop etcd.
On an error all that was started is stopped before the error is shown.
"""

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pdcluster_api.errors import EtcdUnreachableError, StartError
from pdcluster_api.manifests.worker_config import policy_file
from pdcluster_schema.etcd_keys import workers_prefix
from pdcluster_schema.faults import Fault
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.sections import ENGINELESS, PICKER
from pdctl.local.checked_model import checked
from pdctl.local.ending import DRAIN
from pdctl.local.etcd import running_etcd
from pdctl.local.gpus import needs_gpus, read_driver
from pdctl.local.ineffective import ineffective_remarks
from pdctl.local.known_peers import prefill_known
from pdctl.local.machine import available_cores, port_is_free, require_worker, with_programs
from pdctl.local.model import FoundModel, find_model, with_adapters
from pdctl.local.model_memory import check_memory
from pdctl.local.other_models import local_addresses
from pdctl.local.plan import NO_GPUS, LocalPlan, plan_local
from pdctl.local.policy import PolicyWatcher
from pdctl.local.processes import CONFIGURATION_ERROR, ManagedProcess, Supervisor
from pdctl.local.prometheus import find_prometheus, observing, write_targets
from pdctl.local.run_directory import (
    API_KEYS,
    LOOPBACK,
    RunDirectory,
    RunSettings,
    make_certificates,
    remove_api_keys,
    state_unwritable,
    write_api_key,
    write_process,
    write_yaml,
)
from pdctl.local.screen import Screen
from pdctl.local.verification import watch_remarks, watch_transfers
from pdctl.local.watcher import DisaggregationReporter, Row, Watcher, make_state

# -P: Python files of the folder in which pdctl runs, often a model's, stay out.
WORKER_COMMAND = (sys.executable, "-P", "-m", "pdcluster_worker")


@dataclass(frozen=True)
class UpRequest:
    """Options of a run.

    source:     the file of `cluster`
    port:       not 0, so that a restarted worker keeps its announced address
    host:       address of the API; api_key: that it asks for
    model_path: overrides the object's model; programs: of its stock engine, by type, over its own
    observe:    run Prometheus beside the workers
    """

    source: Path
    cluster: PDCluster
    port: int
    state_dir: Path
    host: str = LOOPBACK
    api_key: str | None = None
    model_path: Path | None = None
    programs: Mapping[str, Path] = field(default_factory=dict)
    observe: bool = False
    command: tuple[str, ...] = WORKER_COMMAND


@dataclass(frozen=True)
class PreparedRun:
    """declared: the object as its file has it, with which edits are compared."""

    request: UpRequest
    declared: PDCluster
    plan: LocalPlan
    model: FoundModel
    warnings: Sequence[Fault] = ()


@dataclass(frozen=True)
class _Components:
    run: RunDirectory
    supervisor: Supervisor
    watcher: Watcher
    policy: PolicyWatcher


@dataclass(frozen=True)
class _Signals:
    """stop: drain; hurry: kill."""

    stop: asyncio.Event
    hurry: asyncio.Event


def up(prepared: PreparedRun, screen: Screen) -> None:
    """Run until SIGINT or SIGTERM, with the name held.  Raises InvalidObjectError or StartError."""
    request = prepared.request
    name = request.cluster.metadata.name
    devices = [device for process in prepared.plan.processes for device in process.devices]
    with RunDirectory.gpus_taken(request.state_dir, name, request.port, devices):
        try:
            asyncio.run(_serve(prepared, screen))
        except OSError as e:
            if e.filename is None:
                raise
            raise _failed(e, request.state_dir) from e
        finally:
            remove_api_keys(request.state_dir, name)


def _failed(error: OSError, state_dir: Path) -> StartError:
    """Name a file of the run, or one that was read or started, and what went wrong."""
    path = Path(os.fsdecode(error.filename))
    is_own = path.absolute().is_relative_to(state_dir.absolute())
    if is_own and error.errno == errno.ENOENT:
        message = f"{path}: is gone; leave {state_dir} as it is while `pdctl up` runs"
        return StartError(message, exit_code=1)
    if is_own:
        return state_unwritable(path, error)
    return StartError(f"{path}: {error.strerror}", exit_code=1)


def prepare(request: UpRequest) -> PreparedRun:
    """All checks before processes are started.  Raises InvalidObjectError or StartError."""
    _check_host(request.host, request.api_key)
    if request.command == WORKER_COMMAND:
        require_worker()
    _check_picker(request.host, request.cluster)
    _check_port(request.host, request.port)
    driver = read_driver() if needs_gpus(request.cluster) else NO_GPUS
    plan = plan_local(request.cluster, cores=available_cores(), port=request.port, driver=driver)
    plan = with_programs(plan, request.source, request.programs)
    if request.observe:
        find_prometheus()
    declared = request.cluster
    request = replace(request, cluster=with_adapters(declared, request.source))
    plan = replace(plan, revision=revision_of(request.cluster.spec))
    model = find_model(request.cluster, request.source, request.model_path)
    warnings = check_memory(request.cluster, model.path)
    if any(
        process.role not in ENGINELESS and not process.engine.is_stock for process in plan.processes
    ):
        checked(model.path, "--config")
    return PreparedRun(request, declared, plan, model, warnings)


def read_key(file: Path) -> str:
    """The key that a file holds.  Raises StartError."""
    try:
        key = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no text"
        raise StartError(
            f"--api-key-file: {file} cannot be read: {reason}; correct the path", exit_code=2
        ) from e
    if not key:
        raise StartError(f"--api-key-file: {file} is empty; write a key into it", exit_code=2)
    check_key(key, f"--api-key-file: {file}")
    return key


def _check_picker(host: str, cluster: PDCluster) -> None:
    """Gateways get the addresses at which workers reach one another."""
    if PICKER in cluster.spec.roles.present() and host not in (LOOPBACK, "0.0.0.0"):
        raise StartError(
            f"--host {host}: a picker names {LOOPBACK} to gateways, where nothing would listen; "
            "leave --host out, or give 0.0.0.0",
            exit_code=2,
        )


def _check_host(host: str, api_key: str | None) -> None:
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError as e:
        reason = f"--host: {host!r} is no IP address; give one of this machine, or 0.0.0.0 for all"
        raise StartError(reason, exit_code=2) from e
    if not is_loopback and api_key is None:
        raise StartError(
            f"--host {host} lets other machines in, and no key is asked for; give "
            "PDCLUSTER_API_KEY or --api-key-file, or leave --host out",
            exit_code=2,
        )
    check_key(api_key)


def check_key(key: str | None, origin: str = "--api-key, or PDCLUSTER_API_KEY") -> None:
    """Raises StartError for one that no header can hold."""
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        reason = (
            f"{origin}: a client can send printable ASCII without spaces alone; give such a key"
        )
        raise StartError(reason, exit_code=2)


def _check_port(host: str, port: int) -> None:
    try:
        free = port_is_free(port, host)
    except OSError as e:
        raise StartError(
            f"port {port} of {host} cannot be used ({e.strerror}); choose another with --port or "
            "PDCLUSTER_PORT, or an address of this machine with --host",
            exit_code=2,
        ) from e
    if not free:
        raise StartError(
            f"port {port} is taken; choose another with --port or PDCLUSTER_PORT", exit_code=2
        )


async def _serve(prepared: PreparedRun, screen: Screen) -> None:
    signals = _listen_to_signals()
    cluster, plan = prepared.request.cluster, prepared.plan
    name, namespace = cluster.metadata.name, cluster.metadata.namespace
    run, key = RunDirectory.create(prepared.request.state_dir, name), prepared.request.api_key
    for line in _beginning(prepared, run):
        screen.echo(line)
    async with (
        running_etcd(cluster, run, screen.echo) as (endpoints, etcd),
        observing(run, screen.echo, starts=prepared.request.observe),
    ):
        settings = RunSettings(
            run,
            prepared.model.path,
            endpoints,
            make_certificates(run.certificates),
            prepared.request.command,
            prepared.request.host,
            write_api_key(run.path / API_KEYS, key) if key else None,
        )
        addresses = partial(local_addresses, state_dir=prepared.request.state_dir)
        write_yaml(run.policy, policy_file(cluster, addresses(cluster)))
        supervisor = Supervisor(
            [write_process(cluster, process, settings) for process in plan.processes], screen.echo
        )

        disaggregation = DisaggregationReporter(cluster, screen.echo)

        def changed(rows: Sequence[Row]) -> None:
            pid = etcd.pid if etcd else None
            screen.show(rows)
            disaggregation.show(rows)
            run.write_state(make_state(policy.cluster, plan, settings, pid, rows))
            write_targets(run, cluster, plan.revision, rows)

        prefix = workers_prefix(namespace, name, plan.revision)
        watcher = Watcher(endpoints, prefix, changed, screen.echo)
        policy = PolicyWatcher(
            *(prepared.request.source, prepared.declared, run.policy, screen.echo),
            on_change=watcher.report,
            addresses=addresses,
        )
        await _prime(watcher)
        await _run_workers(prepared, _Components(run, supervisor, watcher, policy), signals, screen)
    screen.echo("stopped")


def _beginning(prepared: PreparedRun, run: RunDirectory) -> Iterator[str]:
    cluster, plan = prepared.request.cluster, prepared.plan
    yield (
        f"{cluster.metadata.name}: starting revision {plan.revision}, one process per worker: "
        f"{len(plan.processes)}; logs in {run.logs}, scrape config in {run.prometheus}"
    )
    yield f"model {prepared.model.path}, from {prepared.model.origin}"
    for each in plan.processes:
        if each.devices:
            yield f"{each.name} has GPU {', '.join(str(gpu.index) for gpu in each.devices)}"
    yield from (f"warning: {each}" for each in prepared.warnings)
    yield from ineffective_remarks(cluster)


async def _run_workers(
    prepared: PreparedRun, components: _Components, signals: _Signals, screen: Screen
) -> None:
    workers = [
        (process.role, process.pool.name, managed)
        for process, managed in zip(
            prepared.plan.processes, components.supervisor.managed_processes, strict=True
        )
    ]
    components.supervisor.start()
    background = {
        asyncio.create_task(components.watcher.run(workers)),
        asyncio.create_task(components.policy.run()),
        asyncio.create_task(
            watch_transfers(components.run, components.watcher.all_ready, screen.echo)
        ),
    }
    remarks = asyncio.create_task(
        watch_remarks(components.run, components.watcher.all_ready, screen.echo)
    )
    stop = asyncio.create_task(signals.stop.wait())
    failed = asyncio.create_task(components.supervisor.wait_failed())
    ready = asyncio.create_task(_serves(components))
    try:
        await _first_of({stop, failed, ready} | background)
        if failed.done():
            raise _start_error(failed)
        if ready.done() and not stop.done():
            screen.echo(
                _announcement(
                    prepared.request,
                    components.watcher.http_address(prepared.plan.ingress.name),
                )
            )
            await _first_of({stop} | background)
        screen.echo("draining; once more ends it at once")
    finally:
        components.supervisor.drain()
        components.watcher.poll(workers)  # a short drain ends before the next poll
        await components.supervisor.wait_drained(signals.hurry)
        components.watcher.poll(workers)
        tasks = (*background, remarks, stop, failed, ready)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serves(components: _Components) -> None:
    await components.watcher.all_ready.wait()
    await prefill_known(components.run.read_state() or {"workers": ()})


async def _prime(watcher: Watcher) -> None:
    try:
        await watcher.prime()
    except EtcdUnreachableError as e:
        raise StartError(
            f"{e}; it answered a moment ago: start it again and try once more", exit_code=1
        ) from e


async def _first_of(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait for the first to end; raises its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def _start_error(failed: asyncio.Task[ManagedProcess | None]) -> StartError:
    managed = failed.result()
    if managed is None:
        return StartError("every worker was stopped", exit_code=1)
    return StartError(
        f"{managed.launch.name}: {managed.last_error()} (log {managed.launch.log})",
        exit_code=CONFIGURATION_ERROR,
    )


def _announcement(request: UpRequest, address: str) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    name = request.cluster.spec.model.name
    body = json.dumps({"model": name, "messages": messages, "temperature": 0})
    url = f"http://{address}/v1"
    value = "$PDCLUSTER_API_KEY" if "PDCLUSTER_API_KEY" in os.environ else "KEY"
    key = f' -H "Authorization: Bearer {value}"' if request.api_key else ""
    return (
        f"ready: {url}\npage:  http://{address}/\n\n"
        f"  curl {url}/chat/completions -H 'Content-Type: application/json'{key} "
        f"\\\n    -d '{body}'\n\nCtrl-C to stop"
    )


def _listen_to_signals() -> _Signals:
    """The first SIGINT or SIGTERM stops, a later one hurries; DRAIN alone stops."""
    signals = _Signals(asyncio.Event(), asyncio.Event())

    def on_signal() -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    asyncio.get_running_loop().add_signal_handler(DRAIN, signals.stop.set)
    return signals
