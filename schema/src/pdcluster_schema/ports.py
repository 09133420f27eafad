"""Ports, addresses and the name in a certificate of a worker, and names that both sides share."""

from typing import Literal

WORKER_NAME = "worker.pdcluster"  # what a worker expects its peer's certificate to say
WORKER_SERVICE = "pdcluster.worker.Worker"  # of its gRPC port

HTTP_PORT, GRPC_PORT, KV_PORT = 8000, 9000, 9100
HEAD_PORT = 9001  # where the engines of a worker's other pods join
MASTER_PORT = 29501  # where the ranks of a stock engine's other pods join
PICKER_PORT = 9002  # of an endpoint picker, for gateways

MAX_ENGINES = 8  # engine processes of one worker
MAX_RANKS = 8  # of one pod: the accelerators of one machine
MAX_WORKER_RANKS = 64  # of one worker, over all its pods
MAX_ADAPTERS = 64  # LoRA adapters of one worker
MAX_PODS = 16  # of one worker
NUM_KV_PORTS = MAX_ENGINES * MAX_RANKS  # from KV_PORT on, as many as any revision may use
NUM_UCX_PORTS = 128  # behind them: one for each rank and each network device of the machine


GRACE_SECONDS = "PDCLUSTER_GRACE_SECONDS"  # variable of a worker: from SIGTERM to SIGKILL

MAX_PORT = 65535


def parse_address(address: str) -> tuple[str, int]:
    """Split "10.0.0.1:9100", "[fd00::1]:9100" or "worker-0.pods:9100".

    Raises ValueError that names the address; an IPv6 host without brackets is refused because its
    port is ambiguous.
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != is_bracketed:
        raise ValueError(f"address {address!r} is not host:port (an IPv6 host goes in brackets)")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f"address {address!r}: port must be in 1..{MAX_PORT}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


SchedulerName = Literal[
    "continuous",
    "sarathi",
    "prefill-first",
    "orca",
    "request-level",
    "simple-chunking",
]

WHOLE_PROMPT_SCHEDULERS: tuple[SchedulerName, ...] = ("prefill-first", "orca", "request-level")
"""Those that compute a prompt in one step, whatever its length."""
