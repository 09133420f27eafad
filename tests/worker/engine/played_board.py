"""The board of a prefill delayer, played by a test."""

from pdcluster_worker.engine.prefill_delayer import RankState


class PlayedBoard:
    """Other engines as a test has them."""

    def __init__(self, *others: RankState) -> None:
        self.said: list[RankState] = list(others)
        self.published: list[RankState | None] = []

    def publish(self, state: RankState) -> None:
        self.published.append(state)

    def withdraw(self) -> None:
        self.published.append(None)

    def others(self) -> list[RankState]:
        return self.said
