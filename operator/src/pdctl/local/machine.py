"""CPU cores and free ports of this machine, and the programs of workers and engines on it."""

import errno
import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from pdcluster_api.errors import StartError
from pdcluster_api.manifests.stock import DEFAULT_COMMANDS
from pdcluster_api.manifests.vllm import VllmSettings
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.stock_engine import STOCK
from pdctl.local.plan import LocalPlan, ProcessSpec

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """By affinity and cgroup quota, in whole cores, at least one."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores(cgroup)
    return max(1, min(cores, int(quota))) if quota is not None else cores


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """port 0 = any.  Raises OSError for one that this user may not use, or a foreign address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # as servers do: a closed connection's remains are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
            raise
        return True


def require_worker() -> None:
    """Raises StartError where pdctl is installed without workers."""
    if importlib.util.find_spec("pdcluster_worker") is None:
        reason = "pdctl is installed without workers; pip install 'pdcluster[worker]'"
        raise StartError(reason, exit_code=1)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """In a row."""
    while True:
        with ExitStack() as held, suppress(OSError, OverflowError):
            ports = [0]
            while len(ports) <= count:
                each = held.enter_context(socket.socket())
                each.bind(("127.0.0.1", ports[-1] and ports[-1] + 1))
                ports.append(each.getsockname()[1])
            return ports[1:]


def _cgroup_cores(cgroup: Path) -> float | None:
    """CPU quota of cgroup version 2 or 1; None = no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def with_programs(plan: LocalPlan, source: Path, given: Mapping[str, Path]) -> LocalPlan:
    """Resolve the program of each worker with a stock engine.

    source: the PDCluster's file; a relative path is relative to its folder
    given:  programs by type of engine, over every `engine.command`
    Raises StartError for a given program that does not exist, InvalidObjectError where none is
    found.
    """
    processes = {process.name: _with_program(process, source, given) for process in plan.processes}
    return replace(plan, processes=tuple(processes.values()), ingress=processes[plan.ingress.name])


def vllm_settings(num_ranks: int) -> VllmSettings:
    http, kv_events, *others = free_ports(1 + 2 * num_ranks)
    side_channel = others[num_ranks - 1]
    return VllmSettings(http=http, kv_events=kv_events, side_channel=side_channel, is_process=True)


def _with_program(process: ProcessSpec, source: Path, given: Mapping[str, Path]) -> ProcessSpec:
    engine = process.engine
    if not engine.is_stock:
        return process
    kind = engine.type
    program, *first_arguments = engine.command or DEFAULT_COMMANDS[kind]
    option = given.get(kind)
    found = _found(program, source) if option is None else _from_option(option, kind)
    if found is None:
        reason = f"no program {program} is on this machine"
        fix = (
            f"install {STOCK[kind]} into an environment of its own and give its program with "
            f"`pdctl up FILE --{kind} ENVIRONMENT/bin/{Path(program).name}`, or put it on the PATH"
        )
        raise InvalidObjectError([Fault("spec.engine.command", reason, fix)])
    command = (found, *first_arguments)
    return replace(process, engine=engine.model_copy(update={"command": command}))


def _from_option(program: Path, kind: str) -> str:
    path = program.expanduser().absolute()
    if shutil.which(path) is None:
        raise StartError(f"--{kind}: no program at {program}; correct the path", exit_code=2)
    return str(path)


def _found(program: str, source: Path) -> str | None:
    if "/" not in program:
        return shutil.which(program)
    return shutil.which(str(source.absolute().parent / Path(program).expanduser()))
