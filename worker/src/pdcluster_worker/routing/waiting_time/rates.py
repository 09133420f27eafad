"""Measured rates of an engine, each with the preset that holds until then."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")

_KEPT = 0.9  # weight of a completion at each later one, in the prefill rate

KEPT = 0.97  # and in the step time: half after 23

MIN_SPREAD = 0.25  # standard deviation of batches below which no slope is fitted


class LruDict(Generic[ValueT]):
    """Bounded, because clients choose how many groups there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[str, ValueT] = OrderedDict()

    def get(self, name: str, default: ValueT) -> ValueT:
        if name not in self._values:
            return default
        self._values.move_to_end(name)
        return self._values[name]

    def put(self, name: str, value: ValueT) -> None:
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class Presets:
    """Values that an estimator uses until it has measured."""

    token_seconds: float | None = None  # None = no estimate before it is measured
    output_tokens: float = 256.0  # of an answer
    max_output_tokens: int = 8192
    prefill_tokens_per_second: float | None = None  # None = 0 s until measured


class PrefillRate:
    """Recent prompt tokens prefilled a second."""

    def __init__(self, preset_tokens_per_second: float | None) -> None:
        self._preset = preset_tokens_per_second
        self._tokens = self._seconds = 0.0

    def observe(self, prompt_tokens: int, prefill_seconds: float | None) -> None:
        """A completion whose prompt was cached, or that was not timed, is ignored."""
        if prefill_seconds is None or prefill_seconds <= 0 or prompt_tokens <= 0:
            return
        self._tokens = _KEPT * self._tokens + prompt_tokens
        self._seconds = _KEPT * self._seconds + prefill_seconds

    def seconds(self, prompt_tokens: int) -> float:
        """Seconds to prefill so many tokens; 0 with neither a measurement nor a preset."""
        if self._seconds:
            return prompt_tokens * self._seconds / self._tokens
        return prompt_tokens / self._preset if self._preset else 0.0


class StepTime:
    """Time of an output token by the batch: d(b) = base + slope * b, fitted online."""

    def __init__(self, preset_seconds: float | None, min_samples: int) -> None:
        self._preset = preset_seconds
        self._min_samples = min_samples
        self._num_samples = 0
        self._weight = self._batch = self._seconds = 0.0  # fading sums
        self._batch_squared = self._product = 0.0

    def observe(self, decode_seconds: float, output_tokens: int, batch: float) -> None:
        """A longer completion weighs more."""
        if output_tokens < 2:
            return
        seconds, weight = decode_seconds / (output_tokens - 1), float(output_tokens)
        self._weight = KEPT * self._weight + weight
        self._batch = KEPT * self._batch + weight * batch
        self._seconds = KEPT * self._seconds + weight * seconds
        self._batch_squared = KEPT * self._batch_squared + weight * batch * batch
        self._product = KEPT * self._product + weight * batch * seconds
        self._num_samples += 1

    def seconds(self, batch: float) -> float | None:
        """None without a preset and with too few completions."""
        if self._num_samples < self._min_samples:
            return self._preset
        mean, seconds = self._batch / self._weight, self._seconds / self._weight
        spread = self._batch_squared / self._weight - mean * mean
        if spread < MIN_SPREAD**2:
            return seconds
        slope = max(0.0, (self._product / self._weight - mean * seconds) / spread)
        # The line may cross zero below the batches that were seen.
        return max(seconds + slope * (batch - mean), seconds * min(1.0, batch / mean) / 2)
