"""Settings of a vLLM engine.  All ports but the side channel's are on loopback."""

from collections.abc import Iterator
from typing import Annotated

import msgspec

from pdcluster_worker.config.section import Section

OwnPort = Annotated[int, msgspec.Meta(ge=1, le=65535)]

# fields of `engine` that vLLM does not read
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


class VllmConfig(Section, frozen=True):
    port: OwnPort = 8100
    kv_events_port: OwnPort = 8101  # where this worker listens
    side_channel_port: OwnPort = 8200  # where peers' engines get NIXL metadata
    command: tuple[str, ...] = ()  # empty = another container runs it
    env: dict[str, str] = msgspec.field(default_factory=dict)


def pdcluster_only_fields(engine: msgspec.Struct) -> Iterator[str]:
    """Names, as in the file, of given fields that vLLM does not read."""
    for field in msgspec.structs.fields(engine):
        if field.name in OURS_ALONE and getattr(engine, field.name) != field.default:
            yield field.encode_name
