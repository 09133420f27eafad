"""Interface of the worker behind the HTTP side: identity, state and tokens.

`dispatch` implements `Backend`; the HTTP side never learns where a request ran
except for the word that goes into the response header.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.routing.hints import NO_HINTS, RouteHints
from pdcluster_worker.streams import Reader


class WorkerView(Protocol):
    """A worker of any role: its model and whether it lives and serves.

    max_model_len and vocab_size are 0, and device and scheduler are None, until its engine is
    ready.
    length_note: why max_model_len is lower than the model's own length; empty where it is not.
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
    """A worker that generates."""

    def num_ingresses(self) -> int:
        """Workers over which the requests of clients are spread, this one included."""
        ...

    def generate(
        self, specs: list[RequestSpec], prefill: PrefillMode, hints: RouteHints = NO_HINTS
    ) -> AsyncGenerator[Generated, None]:
        """Run all choices of one prompt; `Generated.index` counts in `specs`.  hints: what it says
        of its route.

        Ends after the last token of the last choice.  `aclose()` cancels every
        choice that still runs.  Raises RequestError before or after tokens.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End one of a prompt's choices early (a stop string was found): it makes no more tokens,
        its siblings go on.

        Unknown and ended ids are a no-op.  The last choice of a prompt ends by `aclose()` of its
        stream.
        """
        ...

    def follow(self, request_id: str, reader: Reader[Generated]) -> None:
        """Have the later tokens of a prompt's lone choice taken by `reader`.

        While its stream is waited for, and as far as this worker can: all others, the last one and
        errors come from the stream as before.
        """
        ...
