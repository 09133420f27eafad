"""Values that an estimator goes by until it has measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presets:
    """token_seconds: of one output token; None = no estimate is given before it is measured.

    output_tokens:             of an answer.
    max_output_tokens:         of the longest answer that a request may ask for.
    prefill_tokens_per_second: None = a prefill takes no time until one is measured.
    """

    token_seconds: float | None = None
    output_tokens: float = 256.0
    max_output_tokens: int = 8192
    prefill_tokens_per_second: float | None = None
