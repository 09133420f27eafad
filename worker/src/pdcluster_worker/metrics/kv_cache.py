"""KV blocks: their states, the prefix cache, and their moves between workers."""

from collections.abc import Callable

from pdcluster_worker.metrics.registering import Registering


class KVCacheMetrics(Registering):
    """States of KV blocks, prefix hits and transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size: Callable[[], int] = lambda: 0
        """Gives the tokens of one block; no metric of ours."""
        self.kv_cache_usage_ratio = self._gauge(
            "kv_cache_usage_ratio", "share of KV blocks that hold a live request's tokens"
        )
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks by state", "state")
        self.fences_overdue = self._gauge(
            "fences_overdue",
            "fences that have not been answered in time; their blocks stay quarantined",
        )
        self.prefix_cache_query_tokens = self._counter(
            "prefix_cache_query_tokens", "tokens looked up in the prefix cache"
        )
        self.prefix_cache_hit_tokens = self._counter(
            "prefix_cache_hit_tokens", "tokens found in the prefix cache"
        )
        self.prefix_cache_evictions = self._counter(
            "prefix_cache_evictions", "cached KV blocks taken for other tokens"
        )
        self.kv_transfer_seconds = self._histogram(
            "kv_transfer_seconds", "first write to last acknowledgement of one request's KV"
        )
        self.kv_transfer_bytes = self._counter(
            "kv_transfer_bytes", "KV bytes moved", "direction", first=("sent", "received")
        )
        self.kv_transfer_bytes_per_second = self._gauge(
            "kv_transfer_bytes_per_second", "rate of the last KV transfer from here", "transport"
        )
        self.kv_transport_info = self._gauge(
            "kv_transport_info",
            "always 1; its label names the transport of the last KV, at first the one it has",
            "transport",
        )
        self.kv_transport_fallbacks = self._counter(
            "kv_transport_fallbacks",
            "KV transfers from here that another transport moved than engine.transport asks for",
        )
        self.kv_verifications = self._counter(
            "kv_verifications",
            "verifications of a KV transfer to here, by outcome",
            "outcome",
            first=("verified", "failed", "postponed"),
        )
        self.kv_prefixes_given = self._counter(
            "kv_prefixes_given",
            "prefixes whose KV this decode worker offered to a prefill worker that lacked it",
            "outcome",
            first=("ok", "refused", "failed"),
        )
        self.kv_prefixes_taken = self._counter(
            "kv_prefixes_taken", "prefixes whose KV this prefill worker took from a decode worker"
        )
        self.kv_handovers = self._counter(
            "kv_handovers",
            "requests that moved here and read their KV from the worker that they left, by outcome",
            "outcome",
            first=("ok", "failed", "stalled", "cancelled"),
        )
