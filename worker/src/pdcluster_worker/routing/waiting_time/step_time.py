"""Time of an output token as a function of the batch: d(b) = base + slope * b, fitted online."""

KEPT = 0.97  # weight of a completion at each later one: half after 23

MIN_SPREAD = 0.25  # standard deviation of batches below which no slope is fitted


class StepTime:
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
        self._fade()
        self._weight += weight
        self._batch += weight * batch
        self._seconds += weight * seconds
        self._batch_squared += weight * batch * batch
        self._product += weight * batch * seconds
        self._num_samples += 1

    def _fade(self) -> None:
        self._weight *= KEPT
        self._batch *= KEPT
        self._seconds *= KEPT
        self._batch_squared *= KEPT
        self._product *= KEPT

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
