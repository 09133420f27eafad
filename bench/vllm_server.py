"""vLLM under test: `vllm serve` from its own virtual environment, in its best form for this
machine's cores.

Best here means what was measured best on two cores: as many threads as cores,
each bound to one, eager mode (its compiled form answered wrongly), bfloat16.
It listens on loopback only.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from asyncio.subprocess import STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from footprint import Footprint, Watched, idle_footprints
from stats import EngineCounters
from system import Address

from pdcluster_api.errors import StartError
from pdctl.bench.load import BenchRequest, OnChunk, TokenUsage
from pdctl.bench.measure import START_LIMIT_SECONDS, end_process
from pdctl.bench.openai import OpenAIServer, http_session
from pdctl.local.machine import free_port

FOLDER = Path.home() / ".cache" / "pdcluster" / "vllm"
KV_GIB = 2
_LOG_LINES = 30
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Served:
    """Model that vLLM serves, and its number of cores.  model: its folder, whose name
    clients use.
    """

    model: Path
    num_threads: int
    dtype: str = "bfloat16"
    max_model_len: int = 4096

    def command(self, port: int) -> list[str]:
        """The server's command."""
        return [
            *(
                str(FOLDER / "bin" / "vllm"),
                "serve",
                str(self.model),
                "--served-model-name",
                self.model.name,
            ),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--enforce-eager"),
            *("--max-model-len", str(self.max_model_len), "--disable-log-stats"),
        ]

    def environment(self) -> dict[str, str]:
        """The server's and the client's environment, without OpenMP settings that were meant for
        other processes.
        """
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("OMP_", "GOMP_", "KMP_"))
            },
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}"
            if self.num_threads > 1
            else "0",
            "OMP_NUM_THREADS": str(self.num_threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


def check_installed() -> None:
    """Raises StartError where there is no vLLM."""
    if not (FOLDER / ".ready").is_file():
        fix = f"run `bench/peers/install_vllm.sh {FOLDER}`, or leave vllm out with --only"
        raise StartError(f"no vLLM in {FOLDER}: {fix}", exit_code=2)


def version() -> str:
    """The installed one."""
    return (FOLDER / ".ready").read_text().split(maxsplit=1)[0]


@asynccontextmanager
async def running_vllm(name: str, served: Served) -> AsyncIterator["Vllm"]:
    """`vllm serve` from healthy to its last process.

    Raises StartError with its last lines when it does not start.
    """
    check_installed()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pdcluster-bench-vllm-") as folder:
        log = Path(folder) / "vllm.log"
        start = time.monotonic()
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *served.command(port),
                stdout=out,
                stderr=STDOUT,
                env=served.environment(),
                start_new_session=True,
            )
        try:
            async with http_session() as session:
                base_url = f"http://127.0.0.1:{port}"
                await _healthy(session, base_url, process, log)
                server = OpenAIServer(session, base_url, served.model.name)
                yield Vllm(name, served, time.monotonic() - start, process, server)
        finally:
            await end_process(process)
            # its engine's processes, where it left them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM that serves."""

    name: str
    served: Served
    start_seconds: float
    process: Process
    server: OpenAIServer

    @property
    def address(self) -> Address:
        """Its HTTP."""
        return Address(self.server.base_url, self.server.model)

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        """See `load.Target`."""
        return await self.server.send(ask, on_chunk)

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """Its engine counts other things than ours."""
        return {}

    async def footprints(self, seconds: float) -> list[Footprint]:
        """Footprints of all its processes."""
        return await idle_footprints([Watched(self.name, self.process.pid, KV_GIB << 30)], seconds)

    def conditions(self) -> list[str]:
        """Options that it was started with."""
        served = self.served
        setting = f"dtype {served.dtype}, threads {served.num_threads}, bound to cores, eager"
        return [f"{self.name} {version()}: {setting}, {KV_GIB} GiB of KV"]


async def _healthy(
    session: aiohttp.ClientSession, base_url: str, process: Process, log: Path
) -> None:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < deadline and process.returncode is None:
        try:
            async with session.get(f"{base_url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass  # it does not listen yet
        await asyncio.sleep(_POLL_SECONDS)
    said = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    reason = (
        f"not healthy in {START_LIMIT_SECONDS:g} s"
        if process.returncode is None
        else f"ended with {process.returncode}"
    )
    raise StartError(f"vLLM did not start: {reason}:\n{said}", exit_code=1)
