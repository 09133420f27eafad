"""Speeds of a worker by a few numbers, for a simulation without measured or computed step times."""

from dataclasses import asdict, dataclass

from pdcluster_api.errors import StartError

ESTIMATED = {"prefill": "B200", "decode": "B300", "mixed": "B300"}
"""Accelerator of each role that the defaults are estimates for."""

_MOST_TOKENS = 1_000_000  # of a step, to draw its line


@dataclass(frozen=True)
class Speeds:
    """One worker of the first pool of its role, by default with a 70B model in bfloat16.

    step_seconds:   of a decode step with one stream
    stream_seconds: that each further stream adds to a step
    kv_tokens:      capacity of a worker's KV cache
    """

    prefill_tokens_per_second: float = 8_000.0
    step_seconds: float = 0.022
    stream_seconds: float = 0.0001
    kv_tokens: int = 393_000

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            may_be_zero = name == "stream_seconds"
            if not (0.0 < number < 1e12 or (may_be_zero and number == 0.0)):
                least = "from 0 on" if may_be_zero else "of more than 0"
                fix = f"give a finite number {least}"
                option, reason = f"--{name.replace('_', '-')}", f"must not be {number:g}"
                raise StartError(f"{option}: {reason}; {fix}", exit_code=2)

    def is_estimate(self, role: str) -> bool:
        """Return whether a number of that role is a default."""
        decode = ("step_seconds", "stream_seconds", "kv_tokens")
        names = ("prefill_tokens_per_second",) if role == "prefill" else decode
        return any(getattr(self, name) == getattr(Speeds, name) for name in names)

    def seconds(self, role: str, num_tokens: int) -> float:
        """Time of a step: a line in streams, or the time of a prompt where that is longer."""
        prompt = num_tokens / self.prefill_tokens_per_second
        if role == "prefill":
            return prompt
        return max(prompt, self.step_seconds + self.stream_seconds * (num_tokens - 1))

    @property
    def prompt_tokens(self) -> int:
        """From about how many tokens on a step of a decode worker takes the time of a prompt."""
        slope = 1.0 / self.prefill_tokens_per_second - self.stream_seconds
        if slope <= 0.0:
            return _MOST_TOKENS
        number = (self.step_seconds - self.stream_seconds) / slope
        return int(min(max(2.0, number), _MOST_TOKENS))

    def rows(self, role: str) -> tuple[tuple[int, float], ...]:
        """Points of those lines, for `StepModel`."""
        bend = self.prompt_tokens
        numbers = (1, bend, bend + 1, 2 * _MOST_TOKENS)
        return tuple((number, self.seconds(role, number)) for number in numbers)
