"""Recent prompt tokens prefilled a second."""

KEPT = 0.9  # weight of a completion at each later one


class PrefillRate:
    def __init__(self, preset_tokens_per_second: float | None) -> None:
        self._preset = preset_tokens_per_second
        self._tokens = self._seconds = 0.0

    def observe(self, prompt_tokens: int, prefill_seconds: float | None) -> None:
        """A completion whose prompt was cached, or that was not timed, is ignored."""
        if prefill_seconds is None or prefill_seconds <= 0 or prompt_tokens <= 0:
            return
        self._tokens = KEPT * self._tokens + prompt_tokens
        self._seconds = KEPT * self._seconds + prefill_seconds

    def seconds(self, prompt_tokens: int) -> float:
        """Seconds to prefill so many tokens; 0 with neither a measurement nor a preset."""
        if self._seconds:
            return prompt_tokens * self._seconds / self._tokens
        return prompt_tokens / self._preset if self._preset else 0.0
