"""The routers under test, each a process of its own in front of the same number of fake workers.

Ours is the `router` role as it is deployed, in both of its modes: `python -m pdcluster_worker`,
etcd, mutual TLS, its metrics and journeys.  The others run as their own command starts them, from
an environment of their own (`peers/install_routers.sh`), without access logs, and take their
workers in turn: their cheapest policy.  They relay the bytes of OpenAI's API, as ours does where it
relays; else ours has the API itself, with tokens on its other side.  Envoy with our picker is two
processes: one thread of Envoy, set up as examples/gateway/envoy.yaml, and the `picker` role.
"""

import asyncio
import base64
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from router_fakes import CERTIFICATES, MODEL, REVISION

from pdcluster_api.errors import StartError
from pdctl.bench.measure import end_process
from pdctl.local.etcd import etcd_launch, find_etcd, wait_until_reachable
from pdctl.local.machine import free_port
from pdctl.local.processes import Launch, spawn
from pdctl.local.run_directory import make_certificates

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.system import envoy

FOLDER = Path.home() / ".cache" / "pdcluster" / "routers"
PEERS = ("sglang-router", "smg", "vllm-router")
OURS, RELAYING = "ours", "ours, relaying"
PICKERS = {
    "Envoy with our picker": {},
    "Envoy with our picker, buffered": {
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
    },
}
"""Each with its processing mode, over the example's."""
READY_SECONDS = 60.0
_NAMESPACE, _CLUSTER = "bench", "overhead"
_POLL_SECONDS = 0.1
_LOG_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Router:
    """One that serves.  address: host:port."""

    name: str
    address: str
    parts: Mapping[str, psutil.Process]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each part and the processes below it so far."""
        return {name: _cpu_seconds(process) for name, process in self.parts.items()}


def _cpu_seconds(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores: of the router under test, and of the fakes, etcd and the load."""

    router: frozenset[int]
    others: frozenset[int]


def cores() -> Machine:
    """The router gets the first core for itself where there are two."""
    first, *others = sorted(os.sched_getaffinity(0))
    return Machine(frozenset([first]), frozenset(others or [first]))


def installed(folder: Path) -> list[str]:
    """Those of others, and what is Envoy's, that are there."""
    found = [name for name in PEERS if (folder / name / "bin" / name).exists()]
    return [*found, *(PICKERS if (envoy.FOLDER / ".ready").is_file() else ())]


@asynccontextmanager
async def fake_workers(kind: str, number: int, folder: Path) -> AsyncIterator[list[Any]]:
    """A process of fake workers, and what it says of them; it ends with ours."""
    script = Path(__file__).with_name("router_fakes.py")
    command = (sys.executable, str(script), kind, str(number), str(folder))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)
        if not line:
            raise StartError(f"the {kind} fake workers did not start", exit_code=1)
        addresses: list[Any] = json.loads(line)
        yield addresses
    finally:
        await end_process(process)


@asynccontextmanager
async def peer_router(
    name: str, folder: Path, workers: Sequence[str], logs: Path
) -> AsyncIterator[Router]:
    """One of PEERS in front of these workers.  Raises StartError."""
    port = free_port()
    program = str(folder / name / "bin" / name)
    verb = () if name == "vllm-router" else ("launch",)
    urls = [f"http://{address}" for address in workers]
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--policy": "round_robin",
        "--log-level": "warning" if name == "vllm-router" else "warn",
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(free_port()),
    }
    words = [word for option in options.items() for word in option]
    async with _started(
        name, (program, *verb, *words, "--worker-urls", *urls), {}, logs
    ) as process:
        yield await _ready(name, port, process, logs)


@asynccontextmanager
async def our_router(
    name: str, workers: Sequence[Mapping[str, str]], certificates: Path, model: Path, folder: Path
) -> AsyncIterator[Router]:
    """The router role, or a picker behind Envoy, in front of these workers, whose records are
    written into an etcd of its own.

    name: RELAYING = it relays.  workers: addresses and engine ids.  Raises StartError.
    """
    logs = folder / name.replace(", ", "-").replace(" ", "-")
    logs.mkdir()
    launch, endpoint = etcd_launch(find_etcd(), logs / "etcd", logs / "etcd.log")
    config, policy = logs / "router.yaml", logs / "policy.yaml"
    listen = {kind: free_port() for kind in ("http", "grpc", "kv", "picker")}
    role = "picker" if name in PICKERS else "router"
    document = {
        "cluster": _CLUSTER,
        "revision": REVISION,
        "role": role,
        "pool": "cpu",
        "model": {"name": MODEL, "path": str(model)},
        "discovery": {"endpoints": [endpoint]},
        "tls": {field: str(certificates / name) for field, name in CERTIFICATES.items()},
        "listen": {"host": "127.0.0.1", **listen},
    }
    config.write_text(yaml.safe_dump(document))
    policy.write_text(yaml.safe_dump({"relaying": {"enabled": name == RELAYING}}))
    environment = {"POD_NAME": "router-0", "POD_NAMESPACE": _NAMESPACE, "POD_IP": "127.0.0.1"}
    files = ("--engine-config", str(config), "--policy", str(policy))
    command = (sys.executable, "-m", "pdcluster_worker", *files)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_started("etcd", launch.command, {}, logs))
        await wait_until_reachable(endpoint, launch.log)
        await _register(endpoint, workers)
        process = await stack.enter_async_context(_started(role, command, environment, logs))
        ready = await _ready(role, listen["http"], process, logs, len(workers))
        if name in PICKERS:
            ready = await stack.enter_async_context(
                _envoy(f"127.0.0.1:{listen['picker']}", PICKERS[name], ready, logs)
            )
        yield Router(name, ready.address, ready.parts)


@asynccontextmanager
async def _envoy(
    address: str, modes: Mapping[str, str], picker: Router, logs: Path
) -> AsyncIterator[Router]:
    port, config = free_port(), logs / "envoy.yaml"
    config.write_text(yaml.safe_dump(envoy.envoy_config(f"127.0.0.1:{port}", address, **modes)))
    async with _started("envoy", envoy.envoy_command(config), {}, logs) as process:
        ready = await _ready("envoy", port, process, logs)
        yield Router("", ready.address, {**picker.parts, **ready.parts})


def certificate_folder(folder: Path) -> Path:
    """New certificates, for the router and the fakes."""
    folder.mkdir()
    make_certificates(folder)
    return folder


async def _register(endpoint: str, workers: Sequence[Mapping[str, str]]) -> None:
    async with aiohttp.ClientSession() as session:
        for number, worker in enumerate(workers):
            pod = f"decode-{number}"
            key = f"/pdcluster/{_NAMESPACE}/{_CLUSTER}/workers/{REVISION}/decode/cpu/{pod}"
            addresses = {
                "grpc_address": worker["address"],
                "kv_address": "127.0.0.1:1",
                "http_address": worker["http"],
            }
            record = {
                "engine_id": worker["engine_id"],
                "pod": pod,
                "role": "decode",
                "pool": "cpu",
                "state": "ready",
                **addresses,
            }
            body = {"key": _base64(key), "value": _base64(json.dumps({**record, "schema": 1}))}
            async with session.post(f"http://{endpoint}/v3/kv/put", json=body) as response:
                response.raise_for_status()


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@asynccontextmanager
async def _started(
    name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path
) -> AsyncIterator[Process]:
    machine = cores()
    process = await spawn(Launch(name, tuple(command), logs / f"{name}.log", environment))
    psutil.Process(process.pid).cpu_affinity(
        [*(machine.others if name == "etcd" else machine.router)]
    )
    try:
        yield process
    finally:
        await end_process(process)


async def _ready(name: str, port: int, process: Process, logs: Path, num_peers: int = 0) -> Router:
    """Wait until it takes requests, ours until it has shaken hands with all its workers.

    Raises StartError.
    """
    address, deadline = f"127.0.0.1:{port}", time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while not await _is_ready(session, address, num_peers):
            if process.returncode is not None or time.monotonic() > deadline:
                tail = (logs / f"{name}.log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
                raise StartError(f"{name} did not start:\n{tail}", exit_code=1)
            await asyncio.sleep(_POLL_SECONDS)
    return Router(name, address, {name: psutil.Process(process.pid)})


async def _is_ready(session: aiohttp.ClientSession, address: str, num_peers: int) -> bool:
    try:
        if num_peers:
            async with session.get(f"http://{address}/metrics") as response:
                return (
                    f'pdcluster_peers{{role="decode",state="ready"}} {num_peers}.0'
                    in await response.text()
                )
        async with session.get(f"http://{address}/readiness") as response:
            return response.status in (200, 404)
    except aiohttp.ClientError:
        return False
