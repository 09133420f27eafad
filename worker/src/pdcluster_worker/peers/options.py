"""gRPC options of both ends, kept together because they must agree.

Pings in both directions find a peer that vanished without closing its
connection within about KEEPALIVE + TIMEOUT; the server permits them that often.
"""

from typing import Any

Options = list[tuple[str, Any]]

SERVER_NAME = "worker.pdcluster"
"""The DNS name in every worker's certificate: workers are known by their CA and engine id, not by
their address.
"""

MAX_MESSAGE_BYTES = 64 << 20
"""Holds a prompt of 128k tokens (5 bytes each at most) many times; a prefix cache goes in parts."""

KEEPALIVE_SECONDS = 5.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0

_COMMON: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # pings beside the data, to size windows: a tenth of what a small answer costs
    ("grpc.http2.bdp_probe", 0),
    # of a window instead; a megabyte a round trip is ample within a cluster
    ("grpc.http2.lookahead_bytes", 1 << 20),
]

SERVER_OPTIONS: Options = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # two workers on one port is a mistake that must be seen
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 1000 / 2)),
]

CHANNEL_OPTIONS: Options = [
    *_COMMON,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the bound of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),  # a retry, and where, is dispatch's decision
]
