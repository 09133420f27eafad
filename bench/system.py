"""Interface of a system under test: ours, vLLM or Hugging Face."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from footprint import Footprint
from stats import EngineCounters

from pdctl.bench.load import LoadTarget


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a system that takes HTTP, and the model's name there."""

    base_url: str
    model: str


class System(LoadTarget, Protocol):
    """A system that is up."""

    @property
    def start_seconds(self) -> float:
        """From its command to ready."""
        ...

    @property
    def address(self) -> Address | None:
        """None where it takes no HTTP."""
        ...

    def conditions(self) -> list[str]:
        """Dtype and threads as the system itself says them, a line for each of its processes."""
        ...

    async def engine_counters(self) -> dict[str, EngineCounters]:
        """By worker; empty where there is nothing to read."""
        ...

    async def footprints(self, seconds: float) -> list[Footprint]:
        """Footprints of its workers over so many idle seconds; empty where they are
        not measured.
        """
        ...


Start = Callable[[], AbstractAsyncContextManager[System]]
