"""A request's life on a prefill worker: compute the prompt, hand over the first token, see the KV
acknowledged.

The decode worker owns the request; when its call is cancelled, ours ends and
nothing stays.  Credits are the gRPC service's; blocks and writes the engine's.
"""

import asyncio
from collections.abc import AsyncGenerator

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Prefill, PrefillDone, PrefillFailed
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.serving.worker_context import WorkerContext


class PrefillDispatcher:
    """Runs prefills for decode peers; implements the gRPC `Prefill`."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker

    async def prefill(
        self, spec: RequestSpec, target: TransferTarget
    ) -> AsyncGenerator[Token | PrefillDone, None]:
        """The first token, then PrefillDone unless that token ended the request.

        Raises RequestError when it cannot be done.
        """
        worker = self._worker
        clock = asyncio.get_running_loop().time
        arrival = clock()
        with worker.request():
            place = worker.engines.open(spec.request_id, lambda: worker.hashes(spec))
            try:
                place.send(Prefill(spec, target))
                while True:
                    output = await place.mailbox.get()
                    if isinstance(output, PrefillFailed):
                        message = f"KV transfer to {target.addresses[0]} failed: {output.reason}"
                        raise RequestError(message, status=503, code="transfer_failed")
                    if not isinstance(output, Token | PrefillDone):
                        raise RequestError(
                            f"the engine answered {type(output).__name__} to Prefill", status=500
                        )
                    if isinstance(output, PrefillDone):
                        worker.note_transfer(output)
                        self._observe(spec, transfer=output.seconds)
                    else:
                        self._observe(
                            spec,
                            queue=output.queue_seconds,
                            prefill=output.prefill_seconds,
                            first_token=clock() - arrival,
                        )
                    yield output
                    if isinstance(output, PrefillDone) or output.finish_reason is not None:
                        return
            finally:
                place.close()

    def _observe(self, spec: RequestSpec, **phases: float | None) -> None:
        for phase, seconds in phases.items():
            if seconds is not None and not spec.verify_transfer:  # that is no client's
                self._worker.metrics.remote_prefill_phase_seconds.labels(phase).observe(seconds)
