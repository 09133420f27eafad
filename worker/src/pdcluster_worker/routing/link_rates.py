"""Rates at which KV moves from each prefill worker to here, by the transfers that have ended.

Pure.  An average that fades, so that a link that has become slow shows within a
few transfers.
"""

from pdcluster_worker.messages.facts import KVGeometry

_NEWEST = 0.2
"""Weight of the newest transfer."""

MAX_PAIRS = 1024
"""Pairs that are remembered; of more the one that was measured first is forgotten."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


def _element_bytes(dtype: str) -> int:
    """Bytes of one element; of a dtype that is not known those of bfloat16, which most KV has."""
    return 1 if dtype.startswith(("fp8", "float8")) else _BYTES.get(dtype, _BYTES["bfloat16"])


def kv_bytes_per_token(geometry: KVGeometry) -> int:
    """Bytes of keys and values of one token in all layers.

    >>> kv_bytes_per_token(KVGeometry(num_kv_heads=40, head_dim=128, num_layers=40, block_size=16,
    ...     dtype="bfloat16"))
    819200
    """
    per_layer = 2 * geometry.num_kv_heads * geometry.head_dim * _element_bytes(geometry.dtype)
    return geometry.num_layers * per_layer


class LinkRates:
    """One per decode worker; pairs are named by the prefill worker's key.

    >>> rates = LinkRates()
    >>> rates.add("p", num_bytes=1000, seconds=1.0)
    >>> rates.add("p", num_bytes=2000, seconds=1.0)
    >>> rates.bytes_per_second("p"), rates.seconds("p", 2400), rates.seconds("unknown", 2400)
    (1200.0, 2.0, 0.0)
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        """Take a transfer that has ended; seconds: with a write under way, 0 = too short to
        measure.
        """
        if seconds <= 0 or num_bytes <= 0:
            return
        rate, old = num_bytes / seconds, self._rates.get(key)
        self._rates[key] = rate if old is None else (1 - _NEWEST) * old + _NEWEST * rate
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def bytes_per_second(self, key: str) -> float:
        """Rate of the pair with that worker; 0 = not measured yet."""
        return self._rates.get(key, 0.0)

    def seconds(self, key: str, num_bytes: int) -> float:
        """Seconds that so many bytes are expected to take; 0 = not measured yet."""
        rate = self._rates.get(key)
        return 0.0 if rate is None else num_bytes / rate
