"""Values that an estimator uses until it has measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presets:
    token_seconds: float | None = None  # None = no estimate before it is measured
    output_tokens: float = 256.0  # of an answer
    max_output_tokens: int = 8192
    prefill_tokens_per_second: float | None = None  # None = 0 s until measured
