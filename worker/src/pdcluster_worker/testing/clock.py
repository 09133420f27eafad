"""A clock for tests, which knows nothing of real time."""


class FakeClock:
    """A clock that moves only when it is moved; seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
