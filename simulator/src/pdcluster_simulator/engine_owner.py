"""Events of a simulated engine."""

from typing import Protocol

from pdcluster_simulator.requests import EngineWork


class EngineOwner(Protocol):
    """Takes the events of an engine, at the time of its queue."""

    def on_token(self, request: EngineWork) -> None:
        """A request's first token here, of its prompt or of one that a peer has computed."""

    def on_gaps(self, seconds: float, number: int) -> None:
        """So many tokens came so long after the ones before them."""

    def on_end(self, request: EngineWork) -> None:
        """It has its last token, and its blocks are free."""

    def on_computed(self, request: EngineWork, num_tokens: int) -> None:
        """So many more tokens of a prompt for a peer are computed."""

    def on_failed(self, request: EngineWork, reason: str) -> None:
        """It can never run here."""

    def on_freed(self) -> None:
        """Blocks have come free."""
