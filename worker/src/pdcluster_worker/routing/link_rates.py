"""Transfer rate of KV from each prefill worker, as a fading average of ended transfers."""

from pdcluster_worker.messages.facts import KVGeometry

_NEWEST = 0.2  # weight of the newest transfer

MAX_PAIRS = 1024  # beyond it the pair measured first is dropped

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


def _element_bytes(dtype: str) -> int:
    """An unknown dtype counts as bfloat16."""
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
    """One per decode worker; keys are of prefill workers."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        """seconds: with a write in flight; 0 = too short to measure."""
        if seconds <= 0 or num_bytes <= 0:
            return
        rate, old = num_bytes / seconds, self._rates.get(key)
        self._rates[key] = rate if old is None else (1 - _NEWEST) * old + _NEWEST * rate
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def bytes_per_second(self, key: str) -> float:
        """0 = not measured yet."""
        return self._rates.get(key, 0.0)

    def seconds(self, key: str, num_bytes: int) -> float:
        """0 = not measured yet."""
        rate = self._rates.get(key)
        return 0.0 if rate is None else num_bytes / rate
