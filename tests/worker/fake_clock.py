"""A clock that a test moves."""


class FakeClock:
    """Seconds; moves only by `advance`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
