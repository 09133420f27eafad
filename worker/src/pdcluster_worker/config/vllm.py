"""The engine file's section for a stock vLLM: where it listens, and how it is started, if it is.

Ports are on this worker's address; all but the side channel's are reached on
loopback alone.  The command is whole: the writer of the file renders its flags.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from pdcluster_worker.config.section import Section

OwnPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]

OURS_ALONE = (
    "device",
    "kv_cache_memory",
    "device_memory_share",
    "num_blocks",
    "threads",
    "data_parallel_size",
    "transport",
    "transfer_bandwidth",
    "verify_transfers",
    "fence_timeout_seconds",
    "admission_watermark",
    "batch_invariant",
    "scheduler",
    "scheduling_policy",
    "long_prefill_token_threshold",
    "chunked_prefill",
    "tbt_slo_milliseconds",
    "chunk_schedule",
    "prefill_delayer",
    "speculation",
)
"""Fields of `engine` that only our own engine reads."""


class VllmConfig(Section, frozen=True):
    """A vLLM server beside this worker.

    port:              of its HTTP, on loopback.
    kv_events_port:    on loopback, where this worker listens and vLLM publishes its KV events.
    side_channel_port: where peers' engines ask for its NIXL metadata, on this worker's address.
    command:           that starts it; empty = another container runs it, and it is waited for.
    env:               of the command, over this process's.
    """

    port: OwnPort = 8100
    kv_events_port: OwnPort = 8101
    side_channel_port: OwnPort = 8200
    command: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)


def pdcluster_only_fields(engine: msgspec.Struct) -> Iterator[str]:
    """Names, as the file spells them, of given fields that a stock engine does not read."""
    for field in msgspec.structs.fields(engine):
        if field.name in OURS_ALONE and getattr(engine, field.name) != field.default:
            yield field.encode_name
