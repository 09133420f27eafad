"""Interface of the worker behind the HTTP side: identity, state and tokens."""

from collections.abc import AsyncGenerator
from typing import Protocol

from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.streams import Reader


class WorkerView(Protocol):
    """Sizes are 0, device and scheduler None, until the engine is ready; length_note: why it is
    shorter.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    length_note: str
    device: DeviceFacts | None
    scheduler: str | None

    def ready(self) -> str | None:
        """None when requests may come, else why not, in words."""
        ...

    def alive(self) -> str | None:
        """None while the engine lives, else why it does not."""
        ...

    def shortfall(self) -> str | None:
        """Parts of a serving worker that do not serve, in words; None when all serve."""
        ...

    def draining(self) -> bool:
        """True if it takes nothing new and is about to end."""
        ...


class Backend(WorkerView, Protocol):
    def num_ingresses(self) -> int:
        """Workers over which the requests of clients are spread, this one included."""
        ...

    def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, `Generated.index` counting in `specs`; `aclose()` cancels
        those that run. Raises RequestError before or after tokens.

        reader: takes tokens of a lone choice while the stream is waited for; all others, the last
                one and errors come from the stream.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a choice early, its siblings go on; unknown ids are a no-op.  The last one ends by
        `aclose()`.
        """
        ...
