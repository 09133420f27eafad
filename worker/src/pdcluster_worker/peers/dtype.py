"""The meaning of `dtype: auto`: what the CPU of a revision's first worker computes natively, for KV
moves only between workers of one dtype.
"""

import logging
from collections.abc import Callable
from itertools import cycle
from typing import get_args

from pdcluster_schema.text import quoted
from pdcluster_worker.config.worker import DiscoveryConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.peers.discovery import CALL_SECONDS
from pdcluster_worker.peers.etcd import Etcd, EtcdError
from pdcluster_worker.peers.tasks import Reconnect
from pdcluster_worker.peers.tls import EtcdCredentials
from pdcluster_worker.system.native_dtype import DType, slow_note

logger = logging.getLogger(__name__)


async def agreed_dtype(
    config: DiscoveryConfig, key: str, proposal: DType, report: Callable[[str], None]
) -> DType:
    """The value of `key` in etcd, or the proposal, which is then stored there.

    Retries until etcd answers; `report` gets the reason of a failure, each time that it changes.
    Raises ConfigError when the key holds no dtype.
    """
    tls = None if config.tls is None else EtcdCredentials(config.tls)
    retry, reported = Reconnect(), ""
    for endpoint in cycle(config.endpoints):
        credentials = None if tls is None else tls.channel()
        try:
            async with Etcd(endpoint, CALL_SECONDS, credentials) as etcd:
                return _parsed(key, await etcd.create(key, proposal.encode()))
        except EtcdError as e:
            if str(e) != reported:
                reported = str(e)
                logger.warning("dtype not agreed etcd=%s reason=%s", endpoint, e)
                report(f"etcd {endpoint}, which keeps the dtype of this revision: {e}")
        await retry.pause()
    raise AssertionError("unreachable: cycle never ends")


def _parsed(key: str, value: bytes) -> DType:
    for dtype in get_args(DType):
        if value == dtype.encode():
            found: DType = dtype
            return found
    raise ConfigError(
        f"etcd has {quoted(value)} under {key}: must be one of {', '.join(get_args(DType))}; "
        "delete that key"
    )


def log_speed(dtype: DType, native: DType, kind: str = "cpu") -> None:
    """Log what a dtype that is not this device's own costs.  kind: cpu or cuda"""
    if note := slow_note(dtype, native, kind):
        logger.warning(note)
    elif dtype != native:
        device = "CPU" if kind == "cpu" else "GPU"
        logger.info(
            "computes in float32; this %s is faster in bfloat16, which model.dtype may ask for",
            device,
        )
